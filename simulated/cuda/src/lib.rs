//! A simulation of NVIDIA's CUDA driver library over the mock.
//!
//! It exports the symbols of `libcuda.so.1` that Highwater uses, with the vendor's ABI. The engine
//! (`highwater-simulated-engine`) implements the rules. `HIGHWATER_MOCK` sets the number and the properties of the devices,
//! and `HIGHWATER_SIMULATED_CUDA` breaks the installation in one way.

#![allow(non_snake_case, reason = "the symbols have the vendor's names")]
#![allow(unreachable_pub, reason = "exported symbols are public and used by nobody in Rust")]

use std::ffi::{c_char, c_void};

use highwater_simulated_engine::blas::{self, BlasTable};
use highwater_simulated_engine::border::{
    self, Handle, HostFunction, address, expect_place, export, get, handle, number, put, put_attribute, put_if_wanted,
    put_text,
};
use highwater_simulated_engine::copies::{self, CopyShape, Direction};
use highwater_simulated_engine::vmm::{self, Properties};
use highwater_simulated_engine::{
    Answer, Code, answer, captures, contexts, create, current, devices, events, graphs, host, ipc, memory, pools,
    process, streams, variants,
};

pub(crate) mod layout;
mod symbols;

use layout::{
    AccessDescription, AllocationProperties, IpcHandle, PeerRowsDescription, RowsDescription, Uuid, peer_rows,
};

/// Runs the body of an exported function.
fn call(function: &str, body: impl FnOnce() -> Answer<()>) -> u32 {
    border::guarded(|| border::unless_injected(function, body))
}

/// Returns the table that the simulated BLAS libraries call.
#[unsafe(no_mangle)]
pub extern "C" fn highwater_simulated_blas() -> *const BlasTable {
    blas::table()
}

/// Returns the number of calls of the driver's functions so far. No driver of NVIDIA has this symbol.
#[unsafe(no_mangle)]
pub extern "C" fn highwater_simulated_calls() -> u64 {
    border::calls()
}

export! {
    /// Handles may be any numbers.
    call -> u32;
    listed in FUNCTIONS;
    checked in signatures against cudarc::driver::sys, [unsafe fn];

    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        process::initialize()
    }

    fn cuDriverGetVersion(version: *mut i32) { answer!(version = variants::variants()?.driver_version) }
    fn cuDeviceGetCount(count: *mut i32) { answer!(count = devices::count()? as i32) }

    fn cuDeviceGet(device: *mut i32, ordinal: i32) {
        devices::get(ordinal)?;
        answer!(device = ordinal)
    }

    fn cuDeviceGetName(name: *mut c_char, length: i32, device: i32) {
        let text = devices::name(device)?;
        // SAFETY: the caller passes null or a buffer of that length.
        unsafe { put_text(name, length, &text) }
    }

    fn cuDeviceGetUuid_v2(uuid: *mut Uuid, device: i32) { answer!(uuid = Uuid(devices::uuid(device)?)) }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) { answer!(bytes = devices::memory_bytes(device)? as usize) }

    fn cuDeviceGetPCIBusId(name: *mut c_char, length: i32, device: i32) {
        let text = devices::pci_bus_id(device)?;
        if usize::try_from(length).is_ok_and(|length| length <= text.len()) {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller passes null or a buffer of that length.
        unsafe { put_text(name, length, &text) }
    }

    fn cuDeviceGetAttribute(value: *mut i32, attribute: u32, device: i32) {
        answer!(value = devices::attribute(attribute, device)?)
    }

    fn cuDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32) {
        answer!(can = i32::from(devices::can_access_peer(device, peer)?))
    }

    fn cuCtxEnablePeerAccess(context: Handle, flags: u32) { devices::enable_peer_access(number(context), flags) }

    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: i32) {
        create!(context = contexts::retain(devices::get(device)?).map(handle))
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) { contexts::release(devices::get(device)?) }

    fn cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32) {
        let (with, is_active) = contexts::state(devices::get(device)?)?;
        // SAFETY: the caller passes null or valid places.
        unsafe {
            put(flags, with)?;
            put(active, i32::from(is_active))
        }
    }

    fn cuCtxGetCurrent(context: *mut Handle) { answer!(context = handle(current::get()?)) }
    fn cuCtxSetCurrent(context: Handle) { current::set(number(context)) }
    fn cuCtxPushCurrent_v2(context: Handle) { current::push(number(context)) }

    fn cuCtxPopCurrent_v2(context: *mut Handle) {
        let answer = handle(current::pop()?);
        // SAFETY: the caller passes null or a valid place.
        unsafe { put_if_wanted(context, answer) };
        Ok(())
    }

    fn cuCtxGetDevice(device: *mut i32) {
        let answer = {
            process::simulation()?;
            devices::ordinal(current::device().ok_or(Code::INVALID_CONTEXT)?)?
        };
        // SAFETY: the caller passes null or a valid place.
        unsafe { put(device, answer) }
    }

    fn cuCtxSynchronize() { streams::synchronize_context() }

    fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        current::with_context()?;
        // SAFETY: the caller passes null or valid places.
        unsafe {
            put_if_wanted(least, streams::PRIORITIES.0);
            put_if_wanted(greatest, streams::PRIORITIES.1);
        }
        Ok(())
    }

    fn cuStreamCreate(stream: *mut Handle, flags: u32) { create!(stream = streams::create(flags, 0).map(handle)) }

    fn cuStreamCreateWithPriority(stream: *mut Handle, flags: u32, priority: i32) {
        create!(stream = streams::create(flags, priority).map(handle))
    }

    fn cuStreamDestroy_v2(stream: Handle) { streams::destroy(number(stream)) }
    fn cuStreamQuery(stream: Handle) { streams::query(number(stream)) }
    fn cuStreamSynchronize(stream: Handle) { streams::synchronize(number(stream)) }

    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: u32) {
        events::stream_wait(number(stream), number(event), flags)
    }

    fn cuStreamGetCtx(stream: Handle, context: *mut Handle) {
        answer!(context = handle(current::handle_of(streams::described(number(stream))?.device)))
    }

    fn cuStreamGetPriority(stream: Handle, priority: *mut i32) {
        answer!(priority = streams::described(number(stream))?.priority)
    }

    fn cuStreamGetFlags(stream: Handle, flags: *mut u32) {
        answer!(flags = streams::described_outside_of_captures(number(stream))?.flags)
    }

    fn cuStreamGetId(stream: Handle, id: *mut u64) {
        answer!(id = streams::described_outside_of_captures(number(stream))?.number)
    }

    fn cuStreamBeginCapture_v2(stream: Handle, mode: u32) { captures::begin(number(stream), mode) }

    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) {
        captures::expect_capture(number(stream))?;
        // SAFETY: the caller gives a place for the answer, or null; a capture that fails gives no graph.
        unsafe { put(graph, handle(0)) }?;
        answer!(graph = handle(captures::end(number(stream))?))
    }

    fn cuStreamIsCapturing(stream: Handle, status: *mut u32) { answer!(status = captures::is_capturing(number(stream))?) }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) {
        // SAFETY: the caller gives a mode, or null.
        let new = unsafe { get(mode) }?;
        let old = captures::exchange_mode(new)?;
        // SAFETY: the place was not null.
        unsafe { put(mode, old) }
    }

    fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, flags: u64) {
        create!(executable = graphs::instantiate(number(graph), flags).map(handle))
    }

    fn cuGraphLaunch(executable: Handle, stream: Handle) { graphs::launch(number(executable), number(stream)) }
    fn cuGraphDestroy(graph: Handle) { graphs::destroy_graph(number(graph)) }
    fn cuGraphExecDestroy(executable: Handle) { graphs::destroy_executable(number(executable)) }

    fn cuGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize) {
        let found = graphs::nodes(number(graph))?;
        // SAFETY: the caller gives a place for the count, or null.
        if !nodes.is_null() && unsafe { get(count) }? == 0 {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller gives a place for the count and room for so many nodes, or null.
        unsafe { border::put_handles(nodes, count, &found) }
    }

    fn cuGraphNodeGetType(node: Handle, kind: *mut u32) { answer!(kind = graphs::node_kind(number(node))?) }

    fn cuLaunchHostFunc(stream: Handle, function: HostFunction, argument: *mut c_void) {
        // SAFETY: function and argument are what the caller promised the vendor they are.
        unsafe { streams::launch_host_function(number(stream), function, argument) }
    }

    fn cuEventCreate(event: *mut Handle, flags: u32) {
        current::with_context()?;
        create!(event = events::create(flags).map(handle))
    }

    fn cuEventDestroy_v2(event: Handle) { events::destroy(number(event)) }
    fn cuEventRecord(event: Handle, stream: Handle) { events::record(number(event), number(stream)) }
    fn cuEventQuery(event: Handle) { events::query(number(event)) }
    fn cuEventSynchronize(event: Handle) { events::synchronize(number(event)) }

    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: Handle, end: Handle) {
        answer!(milliseconds = events::elapsed(number(start), number(end))?)
    }

    fn cuMemAlloc_v2(ptr: *mut u64, bytes: usize) {
        memory::check_allocation()?;
        create!(ptr = memory::allocate(bytes))
    }
    fn cuMemAllocManaged(ptr: *mut u64, bytes: usize, flags: u32) { create!(ptr = memory::allocate_managed(bytes, flags)) }
    fn cuMemFree_v2(ptr: u64) { memory::free(ptr) }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let (unused, all) = memory::info()?;
        // SAFETY: the caller passes null or valid places.
        unsafe {
            put(free, unused as usize)?;
            put(total, all as usize)
        }
    }

    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, ptr: u64) {
        let (start, length) = memory::address_range(ptr)?;
        // SAFETY: the caller gives places for the answers; the vendor lets either be null.
        unsafe {
            put_if_wanted(base, start);
            put_if_wanted(bytes, length as usize);
        }
        Ok(())
    }

    fn cuMemAllocAsync(ptr: *mut u64, bytes: usize, stream: Handle) {
        create!(ptr = memory::allocate_ordered(bytes, number(stream)))
    }

    fn cuMemFreeAsync(ptr: u64, stream: Handle) { memory::free_ordered(ptr, number(stream)) }

    fn cuDeviceGetDefaultMemPool(pool: *mut Handle, device: i32) {
        answer!(pool = handle(pools::default(devices::get(device)?)?))
    }

    fn cuMemPoolSetAttribute(pool: Handle, attribute: u32, value: *mut c_void) {
        // SAFETY: the caller gives a value as wide as the attribute is, or null.
        let value = unsafe { border::get_pool_attribute(attribute, value) }?;
        pools::set_attribute(number(pool), attribute, value)
    }

    fn cuMemPoolGetAttribute(pool: Handle, attribute: u32, value: *mut c_void) {
        let answer = pools::attribute(number(pool), attribute)?;
        // SAFETY: the caller gives a place for this attribute, or null.
        unsafe { put_attribute(value, answer) }
    }

    fn cuMemPoolTrimTo(pool: Handle, keep: usize) { pools::trim(number(pool), keep) }

    fn cuMemPoolSetAccess(pool: Handle, descriptions: *const AccessDescription, count: usize) {
        for index in 0..count {
            // SAFETY: the caller gives so many descriptions.
            let description = unsafe { get(descriptions.wrapping_add(index)) }?;
            if description.location_kind != 1 {
                return Err(Code::INVALID_VALUE);
            }
            pools::set_access(number(pool), description.location, description.flags)?;
        }
        Ok(())
    }

    fn cuMemHostAlloc(ptr: *mut *mut c_void, bytes: usize, flags: u32) {
        expect_place(ptr)?;
        answer!(ptr = std::ptr::with_exposed_provenance_mut(host::allocate(bytes, flags)? as usize))
    }

    fn cuMemFreeHost(ptr: *mut c_void) { host::free(address(ptr)) }
    fn cuMemHostRegister_v2(ptr: *mut c_void, bytes: usize, flags: u32) { host::register(address(ptr), bytes, flags) }
    fn cuMemHostUnregister(ptr: *mut c_void) { host::unregister(address(ptr)) }

    fn cuMemHostGetDevicePointer_v2(device_ptr: *mut u64, ptr: *mut c_void, flags: u32) {
        answer!(device_ptr = host::device_address(address(ptr), flags)?)
    }

    fn cuPointerGetAttribute(value: *mut c_void, attribute: u32, ptr: u64) {
        let answer = memory::pointer_attribute(attribute, ptr)?;
        // SAFETY: the caller gives a place for this attribute, or null.
        unsafe { put_attribute(value, answer) }
    }

    fn cuMemcpyAsync(dst: u64, src: u64, bytes: usize, stream: Handle) {
        // SAFETY: the memory is what the caller promised the vendor it is.
        unsafe { copies::copy(dst, src, bytes, number(stream), Direction::Any) }
    }

    fn cuMemcpyHtoDAsync_v2(dst: u64, src: *const c_void, bytes: usize, stream: Handle) {
        // SAFETY: the memory is what the caller promised the vendor it is.
        unsafe { copies::copy(dst, address(src), bytes, number(stream), Direction::ToDevice) }
    }

    fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: u64, bytes: usize, stream: Handle) {
        // SAFETY: the memory is what the caller promised the vendor it is.
        unsafe { copies::copy(address(dst), src, bytes, number(stream), Direction::ToHost) }
    }

    fn cuMemcpyDtoDAsync_v2(dst: u64, src: u64, bytes: usize, stream: Handle) {
        // SAFETY: the memory is what the caller promised the vendor it is.
        unsafe { copies::copy(dst, src, bytes, number(stream), Direction::OnDevices) }
    }

    fn cuMemcpy2DAsync_v2(rows: *const RowsDescription, stream: Handle) {
        // SAFETY: the caller gives a description, or null.
        let RowsDescription { src, dst, width, height } = unsafe { get(rows) }?;
        let ((from, from_known), (to, to_known)) = (src.start()?, dst.start()?);
        let direction = match (to_known, from_known) {
            (true, true) => Direction::OnDevices,
            (true, false) => Direction::ToDevice,
            (false, true) => Direction::ToHost,
            (false, false) => Direction::Any,
        };
        let shape = CopyShape::new(width, height).with_src_pitch(src.pitch).with_dst_pitch(dst.pitch);
        // SAFETY: the memory is what the caller promised the vendor it is.
        unsafe { copies::copy_rows(to, from, shape, number(stream), direction) }
    }

    fn cuMemcpy3DPeerAsync(rows: *const PeerRowsDescription, stream: Handle) {
        // SAFETY: the caller gives a description, or null.
        let PeerRowsDescription { src, dst, width, height, depth } = unsafe { get(rows) }?;
        let (to, from, shape) = peer_rows(&dst, &src, [width, height, depth])?;
        let contexts = [number(dst.context), number(src.context)];
        // SAFETY: the memory is what the caller promised the vendor it is.
        unsafe { copies::copy_rows_to_peer(to, from, contexts, shape, number(stream)) }
    }

    fn cuMemcpyPeerAsync(dst: u64, dst_context: Handle, src: u64, src_context: Handle, bytes: usize, stream: Handle) {
        // SAFETY: the memory is what the caller promised the vendor it is.
        unsafe { copies::copy_peer(dst, number(dst_context), src, number(src_context), bytes, number(stream)) }
    }

    fn cuMemcpyHtoD_v2(dst: u64, src: *const c_void, bytes: usize) {
        // SAFETY: the memory is what the caller promised the vendor it is.
        unsafe { copies::copy_now(dst, address(src), bytes, Direction::ToDevice) }
    }

    fn cuMemcpyDtoH_v2(dst: *mut c_void, src: u64, bytes: usize) {
        // SAFETY: the memory is what the caller promised the vendor it is.
        unsafe { copies::copy_now(address(dst), src, bytes, Direction::ToHost) }
    }

    fn cuMemcpyDtoD_v2(dst: u64, src: u64, bytes: usize) {
        // SAFETY: the memory is what the caller promised the vendor it is.
        unsafe { copies::copy_now(dst, src, bytes, Direction::OnDevices) }
    }

    fn cuMemsetD8Async(dst: u64, value: u8, count: usize, stream: Handle) {
        // SAFETY: the memory is what the caller promised the vendor it is.
        unsafe { copies::fill(dst, u32::from(value), 1, count, number(stream)) }
    }

    fn cuMemsetD16Async(dst: u64, value: u16, count: usize, stream: Handle) {
        // SAFETY: the memory is what the caller promised the vendor it is.
        unsafe { copies::fill(dst, u32::from(value), 2, count, number(stream)) }
    }

    fn cuMemsetD32Async(dst: u64, value: u32, count: usize, stream: Handle) {
        // SAFETY: the memory is what the caller promised the vendor it is.
        unsafe { copies::fill(dst, value, 4, count, number(stream)) }
    }

    fn cuIpcGetMemHandle(handle: *mut IpcHandle, ptr: u64) { answer!(handle = IpcHandle(ipc::export_memory(ptr)?)) }
    fn cuIpcOpenMemHandle_v2(ptr: *mut u64, handle: IpcHandle, flags: u32) { create!(ptr = ipc::open_memory(&handle.0, flags)) }
    fn cuIpcCloseMemHandle(ptr: u64) { ipc::close_memory(ptr) }

    fn cuIpcGetEventHandle(handle: *mut IpcHandle, event: Handle) {
        answer!(handle = IpcHandle(ipc::export_event(number(event))?))
    }

    fn cuIpcOpenEventHandle(event: *mut Handle, exported: IpcHandle) {
        create!(event = ipc::open_event(&exported.0).map(handle))
    }

    fn cuMemCreate(allocation: *mut u64, bytes: usize, properties: *const AllocationProperties, flags: u64) {
        expect_place(allocation)?;
        // SAFETY: the caller gives properties, or null.
        let properties = Properties::from(unsafe { get(properties) }?);
        answer!(allocation = vmm::create(bytes, &properties, flags)?)
    }

    fn cuMemRelease(allocation: u64) { vmm::release(allocation) }

    fn cuMemRetainAllocationHandle(allocation: *mut u64, ptr: *mut c_void) {
        answer!(allocation = vmm::retain(ptr.addr() as u64)?)
    }

    fn cuMemAddressReserve(ptr: *mut u64, bytes: usize, alignment: usize, _hint: u64, flags: u64) {
        create!(ptr = vmm::reserve(bytes, alignment, flags))
    }

    fn cuMemAddressFree(ptr: u64, bytes: usize) { vmm::free_addresses(ptr, bytes) }

    fn cuMemMap(ptr: u64, bytes: usize, offset: usize, allocation: u64, flags: u64) {
        vmm::map(ptr, bytes, offset, allocation, flags)
    }

    fn cuMemUnmap(ptr: u64, bytes: usize) { vmm::unmap(ptr, bytes) }

    fn cuMemSetAccess(ptr: u64, bytes: usize, descriptions: *const AccessDescription, count: usize) {
        for index in 0..count {
            // SAFETY: the caller gives so many descriptions.
            let description = unsafe { get(descriptions.wrapping_add(index)) }?;
            vmm::set_access(ptr, bytes, description.location_kind, description.location, description.flags)?;
        }
        Ok(())
    }

    fn cuMemExportToShareableHandle(exported: *mut c_void, allocation: u64, kind: u32, flags: u64) {
        expect_place(exported)?;
        let answer = vmm::export(allocation, kind, flags)?;
        // SAFETY: the caller gives a place for a descriptor, which is an `int`.
        unsafe { put(exported.cast(), answer) }
    }

    fn cuMemImportFromShareableHandle(allocation: *mut u64, exported: *mut c_void, kind: u32) {
        // The pointer is a number. The driver takes its low half.
        create!(allocation = vmm::import(exported.addr() as i32, kind))
    }

    fn cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const AllocationProperties, option: u32) {
        // SAFETY: the caller gives properties, or null.
        let properties = Properties::from(unsafe { get(properties) }?);
        if option > 1 {
            return Err(Code::INVALID_VALUE);
        }
        answer!(bytes = vmm::granularity(&properties)? as usize)
    }

    fn cuGetErrorName(error: u32, name: *mut *const c_char) {
        let answer = {
            let (name, _) = Code::describe(error).ok_or(Code::INVALID_VALUE)?;
            name.as_ptr().cast()
        };
        // SAFETY: the caller passes null or a valid place.
        unsafe { put(name, answer) }
    }

    fn cuGetErrorString(error: u32, text: *mut *const c_char) {
        let answer = {
            let (_, text) = Code::describe(error).ok_or(Code::INVALID_VALUE)?;
            text.as_ptr().cast()
        };
        // SAFETY: the caller passes null or a valid place.
        unsafe { put(text, answer) }
    }

    fn cuGetProcAddress_v2(symbol: *const c_char, function: *mut *mut c_void, _version: i32, _flags: u64, status: *mut u32) {
        // SAFETY: the caller gives a text and places for the answers, or null.
        unsafe { border::put_function(symbol, function, status, symbols::find) }
    }
}

export! {
    /// Handles may be any numbers.
    call -> u32;
    listed in OLD_FUNCTIONS;

    fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) {
        answer!(milliseconds = events::elapsed(number(start), number(end))?)
    }
}
