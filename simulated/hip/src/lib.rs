//! A simulation of AMD's HIP runtime over the mock.
//!
//! It exports the symbols of `libamdhip64.so.7` and `.so.6` that Highwater uses, with the vendor's ABI. The engine
//! (`highwater-simulated-engine`) implements the rules. `HIGHWATER_MOCK` sets the number and the properties of the devices,
//! and `HIGHWATER_SIMULATED_HIP` the version and its defects. `scripts/simulated.sh` removes the symbols that a version
//! lacks.

#![allow(non_snake_case, reason = "the symbols have the vendor's names")]
#![allow(unreachable_pub, reason = "exported symbols are public and used by nobody in Rust")]

use std::ffi::{c_char, c_void};
use std::panic::catch_unwind;

use highwater_simulated_engine::blas::{self, BlasTable};
use highwater_simulated_engine::border::{
    self, Handle, HostFunction, address, expect_place, export, get, handle, number, put, put_attribute, put_if_wanted,
    put_text,
};
use highwater_simulated_engine::copies::{self, CopyShape, Direction};
use highwater_simulated_engine::hip::{self, Properties};
use highwater_simulated_engine::{
    Answer, Code, answer, captures, create, devices, events, graphs, ipc, memory, pools, process, streams,
};

pub(crate) mod layout;
mod symbols;
mod texts;

use layout::{IpcHandle, PointerAttributes, PropertiesLayout, Uuid};

/// Runs the body of an exported function on a thread with a device, and records its code.
fn call(function: &str, body: impl FnOnce() -> Answer<()>) -> i32 {
    noted(|| {
        hip::enter()?;
        border::unless_injected(function, body)
    })
}

/// Runs the body of an exported function and records its code.
fn noted(body: impl FnOnce() -> Answer<()>) -> i32 {
    let code = border::guarded(body);
    hip::note(code);
    code as i32
}

/// Returns the table that the simulated hipBLAS calls.
#[unsafe(no_mangle)]
pub extern "C" fn highwater_simulated_blas() -> *const BlasTable {
    blas::table()
}

/// Writes the settings of the simulated hipBLAS: its major version, 1 if rocBLAS has kernels, and the architecture without its
/// features, cut to `room` bytes. Returns a code.
///
/// # Safety
/// The caller must pass places that are valid for a write each, `arch` for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_simulated_hipblas(
    major: *mut u32,
    has_kernels: *mut u32,
    arch: *mut c_char,
    room: i32,
) -> i32 {
    noted(|| {
        let settings = hip::settings()?;
        let name = settings.arch.split(':').next().unwrap_or_default();
        // SAFETY: forwarded to the caller.
        unsafe {
            put(major, settings.hipblas())?;
            put(has_kernels, settings.has_kernels.into())?;
            put_text(arch, room, name)
        }
    })
}

/// Runs a call that needs no device.
fn deviceless(_function: &str, body: impl FnOnce() -> Answer<()>) -> i32 {
    noted(body)
}

export! {
    /// No handles are passed.
    deviceless -> i32;
    listed in DEVICELESS_FUNCTIONS;
    checked in deviceless_signatures against cubecl_hip_sys, [unsafe extern "C" fn];

    fn hipInit(flags: u32) { hip::init(flags) }

    fn hipRuntimeGetVersion(version: *mut i32) {
        // SAFETY: the caller passes null or a valid place.
        unsafe { put(version, hip::settings()?.runtime_version()) }
    }

    fn hipDriverGetVersion(version: *mut i32) {
        // SAFETY: the caller passes null or a valid place.
        unsafe { put(version, hip::settings()?.runtime_version()) }
    }

    /// Writes 0 where it returns 100.
    fn hipGetDeviceCount(count: *mut i32) {
        let answer = hip::enter().and_then(|()| border::unless_injected("hipGetDeviceCount", devices::count));
        let found = match answer {
            Ok(devices) => devices,
            Err(Code::NO_DEVICE) => 0,
            Err(code) => return Err(code),
        };
        // SAFETY: the caller gives a place for the number, or null.
        unsafe { put(count, found as i32) }?;
        answer.map(drop)
    }
}

/// The vendor's `hipGetLastError`.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetLastError() -> i32 {
    catch_unwind(hip::last_error).unwrap_or(Code::UNKNOWN.0) as i32
}

/// The vendor's `hipPeekAtLastError`.
#[unsafe(no_mangle)]
pub extern "C" fn hipPeekAtLastError() -> i32 {
    catch_unwind(hip::peek_at_last_error).unwrap_or(Code::UNKNOWN.0) as i32
}

/// The vendor's `hipGetErrorName`.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(code: i32) -> *const c_char {
    texts::describe(code).0.as_ptr().cast()
}

/// The vendor's `hipGetErrorString`.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorString(code: i32) -> *const c_char {
    texts::describe(code).1.as_ptr().cast()
}

/// Fills a structure of properties.
///
/// # Safety
/// `properties` is null or has room for the layout.
unsafe fn put_properties(properties: *mut c_void, layout: PropertiesLayout, device: i32) -> Answer<()> {
    expect_place(properties)?;
    let bytes = layout.fill(&Properties::of(device)?)?;
    // SAFETY: the caller gives room for the whole structure.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), properties.cast(), bytes.len()) };
    Ok(())
}

export! {
    /// Handles may be any numbers.
    call -> i32;
    listed in FUNCTIONS;
    checked in signatures against cubecl_hip_sys, [unsafe extern "C" fn];

    fn hipSetDevice(device: i32) { hip::set_device(device) }
    fn hipGetDevice(device: *mut i32) { answer!(device = hip::device()?) }
    fn hipDeviceGet(device: *mut i32, ordinal: i32) { answer!(device = devices::get(ordinal).map(|_| ordinal)?) }

    fn hipDeviceGetName(name: *mut c_char, length: i32, device: i32) {
        let text = devices::name(device)?;
        // SAFETY: the caller passes null or a buffer of that length.
        unsafe { put_text(name, length, &text) }
    }

    fn hipDeviceGetUuid(uuid: *mut Uuid, device: i32) { answer!(uuid = Uuid(devices::uuid(device)?)) }
    fn hipDeviceTotalMem(bytes: *mut usize, device: i32) { answer!(bytes = devices::memory_bytes(device)? as usize) }

    fn hipDeviceGetPCIBusId(name: *mut c_char, length: i32, device: i32) {
        let text = devices::pci_bus_id(device)?.to_lowercase();
        if usize::try_from(length).is_ok_and(|length| length <= text.len()) {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller passes null or a buffer of that length.
        unsafe { put_text(name, length, &text) }
    }

    fn hipDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) {
        answer!(value = hip::attribute(attribute, device)?)
    }

    fn hipGetDevicePropertiesR0600(properties: *mut c_void, device: i32) {
        // SAFETY: the caller gives room for this layout, or null.
        unsafe { put_properties(properties, layout::R0600, device) }
    }

    fn hipDeviceSynchronize() { streams::synchronize_context() }

    fn hipDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32) {
        answer!(can = i32::from(devices::can_access_peer(device, peer)?))
    }

    fn hipDeviceEnablePeerAccess(peer: i32, flags: u32) { hip::enable_peer_access(peer, flags) }
    fn hipDeviceDisablePeerAccess(peer: i32) { hip::disable_peer_access(peer) }

    fn hipDeviceGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        // SAFETY: the caller passes null or valid places.
        unsafe {
            put_if_wanted(least, streams::HIP_PRIORITIES.0);
            put_if_wanted(greatest, streams::HIP_PRIORITIES.1);
        }
        Ok(())
    }

    fn hipStreamCreate(stream: *mut Handle) { create!(stream = streams::create(0, 0).map(handle)) }
    fn hipStreamCreateWithFlags(stream: *mut Handle, flags: u32) { create!(stream = streams::create(flags, 0).map(handle)) }

    fn hipStreamCreateWithPriority(stream: *mut Handle, flags: u32, priority: i32) {
        create!(stream = streams::create(flags, priority).map(handle))
    }

    fn hipStreamDestroy(stream: Handle) { hip::destroy_stream(number(stream)) }
    fn hipStreamQuery(stream: Handle) { streams::query(number(stream)) }
    fn hipStreamSynchronize(stream: Handle) { streams::synchronize(number(stream)) }

    fn hipStreamWaitEvent(stream: Handle, event: Handle, flags: u32) {
        events::stream_wait(number(stream), number(event), flags)
    }

    fn hipStreamGetFlags(stream: Handle, flags: *mut u32) {
        answer!(flags = process::simulation()?.stream(number(stream))?.flags)
    }

    fn hipStreamGetPriority(stream: Handle, priority: *mut i32) {
        answer!(priority = process::simulation()?.stream(number(stream))?.priority)
    }

    fn hipStreamGetDevice(stream: Handle, device: *mut i32) { answer!(device = hip::stream_device(number(stream))?) }
    fn hipStreamGetId(stream: Handle, id: *mut u64) { answer!(id = process::simulation()?.stream(number(stream))?.number) }

    fn hipLaunchHostFunc(stream: Handle, function: HostFunction, argument: *mut c_void) {
        // SAFETY: function and argument are what the caller promised the vendor they are.
        unsafe { streams::launch_host_function(number(stream), function, argument) }
    }

    fn hipStreamBeginCapture(stream: Handle, mode: u32) { captures::begin(number(stream), mode) }

    fn hipStreamEndCapture(stream: Handle, graph: *mut Handle) {
        expect_place(graph)?;
        // SAFETY: the caller gives a place for the answer; a capture that fails gives no graph.
        unsafe { put(graph, handle(0)) }?;
        answer!(graph = handle(captures::end(number(stream))?))
    }

    fn hipStreamIsCapturing(stream: Handle, status: *mut u32) { answer!(status = captures::is_capturing(number(stream))?) }

    fn hipStreamGetCaptureInfo(stream: Handle, status: *mut u32, id: *mut u64) {
        let (found, capture) = captures::info(number(stream))?;
        // SAFETY: the caller gives places for the answers; that of the number may be null.
        unsafe {
            put(status, found)?;
            put_if_wanted(id, capture);
        }
        Ok(())
    }

    fn hipThreadExchangeStreamCaptureMode(mode: *mut u32) {
        // SAFETY: the caller gives a mode, or null.
        let new = unsafe { get(mode) }?;
        if new > captures::mode::RELAXED {
            return Err(Code::INVALID_VALUE);
        }
        let old = captures::exchange_mode(new)?;
        // SAFETY: the place was not null.
        unsafe { put(mode, old) }
    }

    fn hipGraphInstantiate(executable: *mut Handle, graph: Handle, node: *mut Handle, log: *mut c_char, room: usize) {
        expect_place(executable)?;
        let answer = handle(graphs::instantiate(number(graph), 0)?);
        // SAFETY: the caller gives a place for the answer, and for what failed where it wants to know: nothing did.
        unsafe {
            put_if_wanted(node, handle(0));
            if room > 0 {
                put_if_wanted(log, 0);
            }
            put(executable, answer)
        }
    }

    fn hipGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, flags: u64) {
        create!(executable = graphs::instantiate(number(graph), flags).map(handle))
    }

    fn hipGraphLaunch(executable: Handle, stream: Handle) { graphs::launch(number(executable), number(stream)) }
    fn hipGraphDestroy(graph: Handle) { graphs::destroy_graph(number(graph)) }
    fn hipGraphExecDestroy(executable: Handle) { graphs::destroy_executable(number(executable)) }

    fn hipGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize) {
        let found = graphs::nodes(number(graph))?;
        // SAFETY: the caller gives a place for the count and room for so many nodes, or null.
        unsafe { border::put_handles(nodes, count, &found) }
    }

    fn hipGraphNodeGetType(node: Handle, kind: *mut u32) { answer!(kind = graphs::node_kind(number(node))?) }
    fn hipEventCreate(event: *mut Handle) { create!(event = events::create(0).map(handle)) }
    fn hipEventCreateWithFlags(event: *mut Handle, flags: u32) { create!(event = events::create(flags).map(handle)) }
    fn hipEventDestroy(event: Handle) { events::destroy(number(event)) }
    fn hipEventRecord(event: Handle, stream: Handle) { events::record(number(event), number(stream)) }

    fn hipEventRecordWithFlags(event: Handle, stream: Handle, flags: u32) {
        match flags {
            0 => events::record(number(event), number(stream)),
            // A record outside of the capture, which the mock cannot make.
            1 => Err(Code::NOT_SUPPORTED),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    fn hipEventQuery(event: Handle) { events::query(number(event)) }
    fn hipEventSynchronize(event: Handle) { events::synchronize(number(event)) }

    fn hipEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) {
        answer!(milliseconds = events::elapsed(number(start), number(end))?)
    }

    fn hipMalloc(memory: *mut Handle, bytes: usize) { create!(memory = hip::allocate(bytes).map(handle)) }
    fn hipMallocManaged(memory: *mut Handle, bytes: usize, flags: u32) {
        create!(memory = memory::allocate_managed(bytes, flags).map(handle))
    }

    fn hipFree(memory: *mut c_void) { hip::free(address(memory)) }

    fn hipMallocAsync(memory: *mut Handle, bytes: usize, stream: Handle) {
        create!(memory = memory::allocate_ordered(bytes, number(stream)).map(handle))
    }

    fn hipFreeAsync(memory: *mut c_void, stream: Handle) { hip::free_ordered(address(memory), number(stream)) }

    fn hipMemcpy(dst: *mut c_void, src: *const c_void, bytes: usize, kind: i32) {
        // SAFETY: the memory is as valid as the caller promised the vendor.
        unsafe { hip::copy_now(address(dst), address(src), bytes, kind) }
    }

    fn hipMemcpyAsync(dst: *mut c_void, src: *const c_void, bytes: usize, kind: i32, stream: Handle) {
        hip::check_kind(kind)?;
        // SAFETY: the memory is as valid as the caller promised the vendor.
        unsafe { copies::copy(address(dst), address(src), bytes, number(stream), Direction::Any) }
    }

    fn hipMemcpyHtoDAsync(dst: *mut c_void, src: *const c_void, bytes: usize, stream: Handle) {
        // SAFETY: the memory is as valid as the caller promised the vendor.
        unsafe { copies::copy(address(dst), address(src), bytes, number(stream), Direction::ToDevice) }
    }

    fn hipMemcpyDtoHAsync(dst: *mut c_void, src: *const c_void, bytes: usize, stream: Handle) {
        // SAFETY: the memory is as valid as the caller promised the vendor.
        unsafe { copies::copy(address(dst), address(src), bytes, number(stream), Direction::ToHost) }
    }

    fn hipMemcpyDtoDAsync(dst: *mut c_void, src: *const c_void, bytes: usize, stream: Handle) {
        // SAFETY: the memory is as valid as the caller promised the vendor.
        unsafe { copies::copy(address(dst), address(src), bytes, number(stream), Direction::OnDevices) }
    }

    fn hipMemcpy2DAsync(
        dst: *mut c_void, dst_pitch: usize, src: *const c_void, src_pitch: usize, width: usize, height: usize, kind: u32,
        stream: Handle,
    ) {
        let shape = CopyShape::new(width, height).with_src_pitch(src_pitch).with_dst_pitch(dst_pitch);
        let kind = i32::try_from(kind).unwrap_or(i32::MAX);
        // SAFETY: the memory is as valid as the caller promised the vendor.
        unsafe { hip::copy_rows(address(dst), address(src), shape, kind, number(stream)) }
    }

    fn hipMemcpyPeerAsync(dst: *mut c_void, dst_device: i32, src: *const c_void, src_device: i32, bytes: usize, stream: Handle) {
        // SAFETY: the memory is as valid as the caller promised the vendor.
        unsafe { hip::copy_peer(address(dst), dst_device, address(src), src_device, bytes, number(stream)) }
    }

    fn hipMemsetAsync(dst: *mut c_void, value: i32, bytes: usize, stream: Handle) {
        // SAFETY: the memory is as valid as the caller promised the vendor.
        unsafe { hip::fill(address(dst), value, bytes, number(stream)) }
    }

    fn hipMemsetD8Async(dst: *mut c_void, value: u8, count: usize, stream: Handle) {
        // SAFETY: the memory is as valid as the caller promised the vendor.
        unsafe { copies::fill(address(dst), u32::from(value), 1, count, number(stream)) }
    }

    fn hipMemsetD16Async(dst: *mut c_void, value: u16, count: usize, stream: Handle) {
        // SAFETY: the memory is as valid as the caller promised the vendor.
        unsafe { copies::fill(address(dst), u32::from(value), 2, count, number(stream)) }
    }

    fn hipMemsetD32Async(dst: *mut c_void, value: i32, count: usize, stream: Handle) {
        // SAFETY: the memory is as valid as the caller promised the vendor.
        unsafe { copies::fill(address(dst), value as u32, 4, count, number(stream)) }
    }

    fn hipMemGetInfo(free: *mut usize, total: *mut usize) {
        let (left, all) = memory::info()?;
        // SAFETY: the caller passes null or valid places.
        unsafe {
            put(free, left as usize)?;
            put(total, all as usize)
        }
    }

    fn hipPointerGetAttributes(attributes: *mut PointerAttributes, pointer: *const c_void) {
        answer!(attributes = PointerAttributes::from(hip::pointer(address(pointer))?))
    }

    fn hipMemGetAddressRange(base: *mut Handle, bytes: *mut usize, pointer: *mut c_void) {
        let (start, length) = memory::address_range(address(pointer))?;
        // SAFETY: the caller passes null or valid places.
        unsafe {
            put_if_wanted(base, handle(start));
            put_if_wanted(bytes, length as usize);
        }
        Ok(())
    }

    fn hipDeviceGetDefaultMemPool(pool: *mut Handle, device: i32) {
        create!(pool = pools::default(devices::get(device)?).map(handle))
    }

    fn hipMemPoolSetAttribute(pool: Handle, attribute: u32, value: *mut c_void) {
        // SAFETY: the caller gives a value as wide as the attribute is, or null.
        let value = unsafe { border::get_pool_attribute(attribute, value) }?;
        pools::set_attribute(number(pool), attribute, value)
    }

    fn hipMemPoolGetAttribute(pool: Handle, attribute: u32, value: *mut c_void) {
        let answer = pools::attribute(number(pool), attribute)?;
        // SAFETY: the caller gives a place that is as wide as the attribute, or null.
        unsafe { put_attribute(value, answer) }
    }

    fn hipMemPoolTrimTo(pool: Handle, keep: usize) { pools::trim(number(pool), keep) }

    fn hipHostMalloc(memory: *mut Handle, bytes: usize, flags: u32) {
        create!(memory = hip::allocate_host(bytes, flags).map(handle))
    }

    fn hipHostFree(memory: *mut c_void) { hip::free(address(memory)) }
    fn hipHostGetFlags(flags: *mut u32, memory: *mut c_void) { answer!(flags = hip::host_flags(address(memory))?) }
    fn hipHostRegister(memory: *mut c_void, bytes: usize, flags: u32) { hip::register(address(memory), bytes, flags) }
    fn hipHostUnregister(memory: *mut c_void) { hip::unregister(address(memory)) }

    fn hipHostGetDevicePointer(device: *mut Handle, memory: *mut c_void, flags: u32) {
        create!(device = hip::device_address(address(memory), flags).map(handle))
    }

    fn hipIpcGetMemHandle(handle: *mut IpcHandle, memory: *mut c_void) {
        answer!(handle = IpcHandle(ipc::export_memory(address(memory))?))
    }

    fn hipIpcOpenMemHandle(memory: *mut Handle, given: IpcHandle, flags: u32) {
        create!(memory = ipc::open_memory(&given.0, flags).map(handle))
    }

    fn hipIpcCloseMemHandle(memory: *mut c_void) { ipc::close_memory(address(memory)) }

    fn hipIpcGetEventHandle(handle: *mut IpcHandle, event: Handle) {
        answer!(handle = IpcHandle(hip::export_event(number(event))?))
    }

    fn hipIpcOpenEventHandle(event: *mut Handle, given: IpcHandle) { create!(event = ipc::open_event(&given.0).map(handle)) }

    fn hipGetProcAddress(name: *const c_char, function: *mut Handle, _version: i32, _flags: u64, status: *mut u32) {
        // SAFETY: the caller gives a text and places for the answers, or null.
        unsafe { border::put_function(name, function, status, symbols::find) }
    }

    fn hipGetDriverEntryPoint(name: *const c_char, function: *mut Handle, _flags: u64, status: *mut u32) {
        // SAFETY: the caller gives a text and places for the answers, or null.
        unsafe { border::put_function(name, function, status, symbols::find) }
    }
}

export! {
    /// Handles may be any numbers.
    call -> i32;
    listed in OLD_FUNCTIONS;

    /// Fills the layout of HIP 5, which is what programs got that were built against it.
    fn hipGetDeviceProperties(properties: *mut c_void, device: i32) {
        // SAFETY: the caller gives room for the layout of HIP 5, or null.
        unsafe { put_properties(properties, layout::R0000, device) }
    }

    fn hipGetDevicePropertiesR0000(properties: *mut c_void, device: i32) {
        // SAFETY: the caller gives room for this layout, or null.
        unsafe { put_properties(properties, layout::R0000, device) }
    }
}
