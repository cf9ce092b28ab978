//! A fake vendor of Rust functions, for the unit tests. It logs every call, checks how it is called, and fails or waits
//! on request.
//!
//! A table holds plain functions, so the process has one fake vendor. The tests that use it take turns.

use std::cell::Cell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Weak};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::backend::DriverBackend;
use super::calls::{BlasCalls, Calls, IpcHandle};
use super::captures::Captures;
use super::codes::{Code, Codes};
use super::platform::{
    AtomicsModes, Blas, ComputeCodes, EventFlags, HostFlags, MathModes, Opened, Platform, Quirks, SharedBlock,
    TransposeCodes, TypeCodes,
};
use super::raw::{Raw, RawBlas, RawEvent, RawGraph, RawGraphExec, RawMemPool, RawStream};
use super::state::DriverState;
use highwater_hal::{
    Backend as _, BackendTag, Capabilities, DeviceInfo, DevicePtr, ErrorKind, Identity, MemoryCopy2d, MemoryHandle,
    PhysicalMemoryOptions, Result, Transport, Transports,
};

/// The code of the fake's own errors.
pub(super) const INVALID: i32 = 1;
/// The granularity of mapped memory: the distance of the fake's addresses.
pub(super) const GRANULARITY: usize = 0x10000;
const OUT_OF_MEMORY: i32 = 2;
pub(super) const NOT_READY: i32 = 600;
const WRONG_THREAD: i32 = 908;
const LOST: i32 = 901;
/// A stream that joined a capture was not waited for. The capture stays open, as on the vendor whose streams die.
const UNJOINED: i32 = 904;

static CODES: Codes = Codes {
    library: "Fake",
    rows: &[
        Code::new(INVALID, "INVALID", ErrorKind::InvalidArgument, ""),
        Code::new(OUT_OF_MEMORY, "OUT_OF_MEMORY", ErrorKind::OutOfMemory, ""),
        Code::new(201, "INVALID_CONTEXT", ErrorKind::InvalidState, ""),
        Code::new(400, "INVALID_HANDLE", ErrorKind::InvalidHandle, ""),
        Code::new(901, "CAPTURE_INVALIDATED", ErrorKind::Capture, ""),
        Code::new(904, "CAPTURE_UNJOINED", ErrorKind::Capture, ""),
    ],
};

static QUIRKS: Quirks = Quirks { rows_anywhere: true, ..COMMON };

/// A vendor whose streams die with a lost capture, and whose handles keep their workspace.
static MORTAL: Quirks = Quirks {
    streams_die_after: &[LOST, UNJOINED],
    events_follow_streams: true,
    set_stream_resets_workspace: false,
    math_modes: None,
    ..COMMON
};

const COMMON: Quirks = Quirks {
    legacy_stream: RawStream(1),
    per_thread_stream: RawStream(2),
    not_ready: NOT_READY,
    out_of_memory: OUT_OF_MEMORY,
    no_elapsed_time: 400,
    stream_flags: 1,
    event_flags: EventFlags { plain: 2, timing: 0, interprocess: 6 },
    host_flags: HostFlags { default: 3, write_combined: 7 },
    register_flags: 3,
    register_read_only_flag: 8,
    ipc_open_flag: 1,
    ipc_open_hint: Some("see the same devices"),
    pool_release_threshold: 4,
    transpose_codes: TransposeCodes { no: 0, yes: 1 },
    type_codes: TypeCodes { f16: 2, bf16: 14, f32: 0, f64: 1 },
    compute_codes: ComputeCodes { f32: 68, tf32: 77, f64: 70 },
    default_algorithm: -1,
    math_modes: Some(MathModes { full: 0, tf32: 3 }),
    atomics_modes: AtomicsModes { not_allowed: 0, allowed: 1 },
    atomics_allowed_at_first: false,
    set_stream_resets_workspace: true,
    streams_die_after: &[],
    events_follow_streams: false,
    rows_anywhere: false,
};

/// Returns the context of a device.
pub(super) const fn context(device: u32) -> u64 {
    0xC0 + device as u64
}

thread_local! {
    /// The context that is current in this thread; 0 for none.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
    /// The thread's capture mode.
    static MODE: Cell<u32> = const { Cell::new(0) };
}

/// A logged call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) name: &'static str,
    /// The context that was current.
    pub(super) context: u64,
    /// The thread's capture mode.
    pub(super) mode: u32,
}

#[derive(Debug, Default)]
struct Vendor {
    calls: Vec<Call>,
    /// The faults in the calls to the fake.
    faults: Vec<String>,
    answers: HashMap<&'static str, VecDeque<i32>>,
    /// The calls that succeed and return no object.
    nothing: HashSet<&'static str>,
    /// The calls that wait.
    waits: HashSet<&'static str>,
    waiting: HashSet<&'static str>,
    alive: HashSet<u64>,
    /// The thread that began the capture, by stream.
    captures: HashMap<u64, Option<std::thread::ThreadId>>,
    /// The stream on which the capture began, by a stream or an event that takes part.
    joined: HashMap<u64, u64>,
    /// The streams that a lost capture left unusable, each with the stream on which the capture began.
    dead: HashMap<u64, u64>,
    /// Whether calls follow events to the streams of their records.
    follows: bool,
    /// The flags of the registrations so far.
    register_flags: Vec<u32>,
    /// Bytes by address.
    memory: HashMap<u64, usize>,
    last: u64,
    /// Whether ends of captures report that a stream was not joined.
    unjoined: bool,
    /// The recorded events with their streams, and the waiting streams with their events.
    records_made: Vec<(u64, u64)>,
    waits_made: Vec<(u64, u64)>,
    /// The streams with their priorities, and the handles with their bound streams.
    streams_made: Vec<(u64, i32)>,
    bound: Vec<(u64, u64)>,
    state: Weak<DriverState<FakePlatform>>,
}

static TURN: Mutex<()> = Mutex::new(());
static VENDOR: std::sync::LazyLock<Mutex<Vendor>> = std::sync::LazyLock::new(Mutex::default);
static CHANGED: Condvar = Condvar::new();

impl Vendor {
    /// Returns the stream on which the capture of `stream` began.
    fn origin_of(&self, stream: u64) -> Option<u64> {
        let joined = || self.joined.get(&stream).copied().filter(|origin| self.captures.contains_key(origin));
        if self.captures.contains_key(&stream) { Some(stream) } else { joined() }
    }

    /// Stores the faults of a call that follows an event to the stream of its last record.
    fn follow(&mut self, name: &str, event: u64) {
        let last = self.records_made.iter().rev().find(|record| record.0 == event);
        let Some((_, stream)) = last.filter(|_| self.follows).copied() else { return };
        if stream > 2 && !self.alive.contains(&stream) {
            self.faults.push(format!("{name} followed an event to {stream:#x}, which is destroyed"));
        }
        if self.origin_of(stream).is_some() && !self.joined.contains_key(&event) {
            self.faults.push(format!("{name} followed an event from before a capture to {stream:#x}"));
        }
    }

    /// Loses a capture and leaves its streams unusable.
    fn kill(&mut self, origin: u64) {
        let events: HashSet<u64> = self.records_made.iter().map(|(event, _)| *event).collect();
        let part = |stream: &u64| self.origin_of(*stream) == Some(origin) && !events.contains(stream);
        let streams: Vec<u64> = self.alive.iter().copied().filter(part).collect();
        self.captures.remove(&origin);
        self.dead.extend(streams.into_iter().map(|stream| (stream, origin)));
    }

    fn made(&mut self, name: &'static str) -> u64 {
        if self.nothing.contains(name) {
            return 0;
        }
        // Aligned as memory is, and different from default streams.
        self.last += 0x10000;
        self.alive.insert(self.last);
        self.last
    }
}

/// Logs a call that uses `objects`. Returns the scripted code, or the result of `act`.
fn call(name: &'static str, objects: &[u64], act: impl FnOnce(&mut Vendor) -> i32) -> i32 {
    let mut vendor = VENDOR.lock();
    vendor.calls.push(Call { name, context: CURRENT.get(), mode: MODE.get() });
    for object in objects {
        if *object > 2 && !vendor.alive.contains(object) {
            vendor.faults.push(format!("{name} was given {object:#x}, which is destroyed"));
        }
    }
    // Another thread frees its lock soon, without a call of the vendor. The caller's own lock stays held.
    let stays_locked = |state: &DriverState<FakePlatform>| {
        (0..200).all(|_| {
            let locked = state.is_locked();
            if locked {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            locked
        })
    };
    if vendor.waits.is_empty()
        && let Some(state) = vendor.state.upgrade()
        && stays_locked(&state)
    {
        vendor.faults.push(format!("{name} was called under a lock"));
    }
    vendor.waiting.insert(name);
    CHANGED.notify_all();
    while vendor.waits.contains(name) {
        CHANGED.wait(&mut vendor);
    }
    vendor.waiting.remove(name);
    for object in objects {
        if *object > 2 && !vendor.alive.contains(object) {
            vendor.faults.push(format!("{object:#x} was destroyed while {name} used it"));
        }
    }
    let dead = objects.iter().any(|object| vendor.dead.contains_key(object));
    if dead && !["stream_destroy", "stream_is_capturing", "stream_end_capture"].contains(&name) {
        vendor.faults.push(format!("{name} was given a dead stream"));
    }
    if let Some(code) = vendor.answers.get_mut(name).and_then(VecDeque::pop_front) {
        return code;
    }
    act(&mut vendor)
}

/// Writes through an out-parameter of a call.
///
/// # Safety
/// The caller must ensure that `out` is valid for writes.
unsafe fn give<T>(out: *mut T, value: T) -> i32 {
    // SAFETY: As the caller promises.
    unsafe { out.write(value) };
    0
}

/// Writes a handle through an out-parameter of a call.
///
/// # Safety
/// The caller must ensure that `out` is valid for writes.
unsafe fn give_handle<R: Raw>(out: *mut R, number: u64) -> i32 {
    // SAFETY: As the caller promises.
    unsafe { give(out, R::from_number(number)) }
}

/// Makes a call that needs a current context.
fn needs_context(name: &'static str, objects: &[u64], act: impl FnOnce(&mut Vendor) -> i32) -> i32 {
    if CURRENT.get() == 0 { call(name, objects, |_| 201) } else { call(name, objects, act) }
}

fn destroy(name: &'static str, object: u64) -> i32 {
    call(name, &[object], |vendor| {
        vendor.alive.remove(&object);
        vendor.memory.remove(&object);
        vendor.captures.remove(&object);
        vendor.joined.remove(&object);
        // Destroying the stream on which a lost capture began frees the streams that joined.
        vendor.dead.retain(|stream, origin| *stream != object && *origin != object);
        0
    })
}

macro_rules! vendor_functions {
    ($($name:ident($($argument:ident: $type:ty),*) $body:block)*) => {
        $(
            // SAFETY: Not unsafe by itself; the out-parameters are those of the table's callers, who let them live until the
            // call returns.
            unsafe extern "C" fn $name($($argument: $type),*) -> i32 $body
        )*
    };
}

vendor_functions! {
    stream_query(stream: RawStream) { call("stream_query", &[stream.number()], |_| 0) }
    stream_synchronize(stream: RawStream) { call("stream_synchronize", &[stream.number()], |_| 0) }
    stream_create_with_priority(out: *mut RawStream, _flags: u32, priority: i32) {
        needs_context("stream_create_with_priority", &[], |vendor| {
            let made = vendor.made("stream_create_with_priority");
            vendor.streams_made.push((made, priority));
            // SAFETY: See the macro.
            unsafe { give_handle(out, made) }
        })
    }
    stream_destroy(stream: RawStream) { destroy("stream_destroy", stream.number()) }
    stream_wait_event(stream: RawStream, event: RawEvent, _flags: u32) {
        let (stream, event) = (stream.0, event.0);
        call("stream_wait_event", &[stream, event], |vendor| {
            vendor.waits_made.push((stream, event));
            // As in the vendor, a wait of a stream is safe if the event's stream was destroyed.
            if vendor.records_made.iter().rev().find(|record| record.0 == event).is_some_and(|record| vendor.alive.contains(&record.1)) {
                vendor.follow("stream_wait_event", event);
            }
            if let Some(origin) = vendor.joined.get(&event).copied().filter(|origin| *origin != stream) {
                vendor.joined.insert(stream, origin);
            }
            0
        })
    }
    get_stream_priority_range(least: *mut i32, greatest: *mut i32) {
        // SAFETY: See the macro.
        needs_context("get_stream_priority_range", &[], |_| unsafe { give(least, 0) + give(greatest, -5) })
    }
    event_create(out: *mut RawEvent, _flags: u32) {
        // SAFETY: See the macro.
        needs_context("event_create", &[], |vendor| unsafe { give_handle(out, vendor.made("event_create")) })
    }
    event_destroy(event: RawEvent) { destroy("event_destroy", event.number()) }
    event_record(event: RawEvent, stream: RawStream) {
        let (event, stream) = (event.0, stream.0);
        call("event_record", &[event, stream], |vendor| {
            vendor.records_made.push((event, stream));
            match vendor.origin_of(stream) {
                Some(origin) => vendor.joined.insert(event, origin),
                None => vendor.joined.remove(&event),
            };
            0
        })
    }
    event_query(event: RawEvent) {
        call("event_query", &[event.number()], |vendor| { vendor.follow("event_query", event.0); 0 })
    }
    event_synchronize(event: RawEvent) {
        call("event_synchronize", &[event.number()], |vendor| { vendor.follow("event_synchronize", event.0); 0 })
    }
    event_elapsed_time(out: *mut f32, start: RawEvent, end: RawEvent) {
        // SAFETY: See the macro.
        call("event_elapsed_time", &[start.number(), end.number()], |_| unsafe { give(out, -1.0) })
    }
    device_synchronize() { needs_context("device_synchronize", &[], |_| 0) }
    mem_alloc(out: *mut DevicePtr, bytes: usize) {
        needs_context("mem_alloc", &[], |vendor| {
            let made = vendor.made("mem_alloc");
            vendor.memory.insert(made, bytes);
            // SAFETY: See the macro.
            unsafe { give_handle(out, made) }
        })
    }
    mem_free(memory: DevicePtr) { destroy("mem_free", memory.number()) }
    mem_get_info(free: *mut usize, total: *mut usize) {
        // SAFETY: See the macro.
        needs_context("mem_get_info", &[], |_| unsafe { give(free, 1 << 30) + give(total, 1 << 30) })
    }
    memcpy_htod_async(_to: DevicePtr, _from: *const u8, _bytes: usize, stream: RawStream) { call("memcpy_htod_async", &[stream.number()], |_| 0) }
    memcpy_dtoh_async(_to: *mut u8, _from: DevicePtr, _bytes: usize, stream: RawStream) { call("memcpy_dtoh_async", &[stream.number()], |_| 0) }
    memcpy_dtod_async(_to: DevicePtr, _from: DevicePtr, _bytes: usize, stream: RawStream) { call("memcpy_dtod_async", &[stream.number()], |_| 0) }
    memset_d8_async(_to: DevicePtr, _value: u8, _count: usize, stream: RawStream) { call("memset_d8_async", &[stream.number()], |_| 0) }
    memset_d16_async(_to: DevicePtr, _value: u16, _count: usize, stream: RawStream) { call("memset_d16_async", &[stream.number()], |_| 0) }
    memset_d32_async(_to: DevicePtr, _value: u32, _count: usize, stream: RawStream) { call("memset_d32_async", &[stream.number()], |_| 0) }
    mem_host_alloc(out: *mut *mut u8, _bytes: usize, _flags: u32) {
        needs_context("mem_host_alloc", &[], |vendor| {
            let made = vendor.made("mem_host_alloc");
            // SAFETY: See the macro. Nothing dereferences the address.
            unsafe { give(out, std::ptr::without_provenance_mut(made as usize)) }
        })
    }
    mem_free_host(memory: *mut u8) { destroy("mem_free_host", memory.addr() as u64) }
    mem_host_register(_memory: *mut u8, _bytes: usize, flags: u32) {
        needs_context("mem_host_register", &[], |vendor| {
            vendor.register_flags.push(flags);
            0
        })
    }
    mem_host_unregister(_memory: *mut u8) { needs_context("mem_host_unregister", &[], |_| 0) }
    mem_host_get_device_pointer(out: *mut DevicePtr, memory: *mut u8, _flags: u32) {
        // SAFETY: See the macro.
        needs_context("mem_host_get_device_pointer", &[], |_| unsafe { give_handle(out, memory.addr() as u64) })
    }
    mem_alloc_async(out: *mut DevicePtr, _bytes: usize, stream: RawStream) {
        // SAFETY: See the macro.
        needs_context("mem_alloc_async", &[stream.number()], |vendor| unsafe { give_handle(out, vendor.made("mem_alloc_async")) })
    }
    mem_free_async(memory: DevicePtr, stream: RawStream) {
        let (memory, stream) = (memory.get(), stream.0); call("mem_free_async", &[memory, stream], |vendor| { vendor.alive.remove(&memory); 0 }) }
    device_get_default_mem_pool(out: *mut RawMemPool, _device: i32) {
        // SAFETY: See the macro.
        call("device_get_default_mem_pool", &[], |vendor| unsafe { give_handle(out, vendor.made("device_get_default_mem_pool")) })
    }
    mem_pool_set_attribute(pool: RawMemPool, _which: u32, _value: *mut u64) { call("mem_pool_set_attribute", &[pool.number()], |_| 0) }
    mem_pool_trim_to(pool: RawMemPool, _keep: usize) { call("mem_pool_trim_to", &[pool.number()], |_| 0) }
    stream_begin_capture(stream: RawStream, mode: u32) {
        let stream = stream.0;
        call("stream_begin_capture", &[stream], |vendor| {
            if vendor.captures.contains_key(&stream) {
                return INVALID;
            }
            vendor.captures.insert(stream, (mode != 2).then(|| std::thread::current().id()));
            0
        })
    }
    stream_end_capture(stream: RawStream, out: *mut RawGraph) {
        let stream = stream.0;
        // As on the vendors, another thread ends the capture and gets no graph.
        call("stream_end_capture", &[stream], |vendor| {
            if vendor.dead.contains_key(&stream) {
                return LOST;
            }
            if vendor.unjoined {
                vendor.kill(stream);
                return UNJOINED;
            }
            match vendor.captures.remove(&stream) {
            Some(Some(thread)) if thread != std::thread::current().id() => WRONG_THREAD,
            Some(_) => {
                let made = vendor.made("stream_end_capture");
                // SAFETY: See the macro.
                unsafe { give_handle(out, made) }
            }
            None => INVALID,
            }
        })
    }
    stream_is_capturing(stream: RawStream, out: *mut u32) {
        let stream = stream.0;
        // SAFETY: See the macro.
        call("stream_is_capturing", &[stream], |vendor| unsafe {
            let of_dead = vendor.dead.get(&stream).map(|origin| if *origin == stream { 2 } else { 1 });
            give(out, of_dead.unwrap_or(u32::from(vendor.origin_of(stream).is_some())))
        })
    }
    thread_exchange_stream_capture_mode(mode: *mut u32) {
        // SAFETY: See the macro.
        unsafe { give(mode, MODE.replace(*mode)) }
    }
    graph_instantiate_with_flags(out: *mut RawGraphExec, graph: RawGraph, _flags: u64) {
        // SAFETY: See the macro.
        needs_context("graph_instantiate_with_flags", &[graph.number()], |vendor| unsafe { give_handle(out, vendor.made("graph_instantiate_with_flags")) })
    }
    graph_launch(graph: RawGraphExec, stream: RawStream) { call("graph_launch", &[graph.number(), stream.number()], |_| 0) }
    graph_destroy(graph: RawGraph) { destroy("graph_destroy", graph.number()) }
    graph_exec_destroy(graph: RawGraphExec) { destroy("graph_exec_destroy", graph.number()) }
    ipc_get_mem_handle(out: *mut IpcHandle, memory: DevicePtr) {
        // SAFETY: See the macro.
        needs_context("ipc_get_mem_handle", &[memory.number()], |_| unsafe { give(out, IpcHandle([7; 64])) })
    }
    ipc_open_mem_handle(out: *mut DevicePtr, _handle: IpcHandle, _flags: u32) {
        needs_context("ipc_open_mem_handle", &[], |vendor| {
            let made = vendor.made("ipc_open_mem_handle");
            vendor.memory.insert(made, OPENED_BYTES);
            // SAFETY: See the macro.
            unsafe { give_handle(out, made) }
        })
    }
    ipc_close_mem_handle(memory: DevicePtr) { destroy("ipc_close_mem_handle", memory.number()) }
    mem_get_address_range(start: *mut DevicePtr, bytes: *mut usize, memory: DevicePtr) {
        let memory = memory.get();
        call("mem_get_address_range", &[memory], |vendor| {
            let found = vendor.memory.get(&memory).copied().unwrap_or(0);
            // SAFETY: See the macro.
            unsafe { give_handle(start, memory) + give(bytes, found) }
        })
    }
    ipc_get_event_handle(out: *mut IpcHandle, event: RawEvent) {
        // SAFETY: See the macro.
        needs_context("ipc_get_event_handle", &[event.number()], |_| unsafe { give(out, IpcHandle([8; 64])) })
    }
    ipc_open_event_handle(out: *mut RawEvent, _handle: IpcHandle) {
        // SAFETY: See the macro.
        needs_context("ipc_open_event_handle", &[], |vendor| unsafe { give_handle(out, vendor.made("ipc_open_event_handle")) })
    }
    blas_create(out: *mut RawBlas) {
        // SAFETY: See the macro.
        needs_context("blas_create", &[], |vendor| unsafe { give_handle(out, vendor.made("blas_create")) })
    }
    blas_destroy(handle: RawBlas) { destroy("blas_destroy", handle.number()) }
    blas_set_stream(handle: RawBlas, stream: RawStream) {
        let (handle, stream) = (handle.0, stream.0);
        call("blas_set_stream", &[handle, stream], |vendor| {
            vendor.bound.push((handle, stream));
            0
        })
    }
    blas_set_atomics_mode(handle: RawBlas, _mode: u32) { call("blas_set_atomics_mode", &[handle.number()], |_| 0) }
    blas_set_workspace(handle: RawBlas, _memory: DevicePtr, _bytes: usize) { call("blas_set_workspace", &[handle.number()], |_| 0) }
    blas_set_pointer_mode(handle: RawBlas, _mode: u32) { call("blas_set_pointer_mode", &[handle.number()], |_| 0) }
    blas_set_math_mode(handle: RawBlas, _mode: u32) { call("blas_set_math_mode", &[handle.number()], |_| 0) }
}

/// The bytes of each block that is opened by a legacy handle.
pub(super) const OPENED_BYTES: usize = 4096;

/// The four product calls. They differ in the type of sizes, and the fake ignores their arguments.
macro_rules! products {
    ($($one:ident, $batch:ident: $size:ty;)*) => {$(
        #[rustfmt::skip]
        unsafe extern "C" fn $one(
            handle: RawBlas, _: i32, _: i32, _: $size, _: $size, _: $size, _: *const u8, _: DevicePtr, _: i32, _: $size, _: DevicePtr, _: i32,
            _: $size, _: *const u8, _: DevicePtr, _: i32, _: $size, _: i32, _: i32,
        ) -> i32 {
            needs_context(stringify!($one), &[handle.0], |_| 0)
        }

        #[rustfmt::skip]
        unsafe extern "C" fn $batch(
            handle: RawBlas, _: i32, _: i32, _: $size, _: $size, _: $size, _: *const u8, _: DevicePtr, _: i32, _: $size, _: i64, _: DevicePtr,
            _: i32, _: $size, _: i64, _: *const u8, _: DevicePtr, _: i32, _: $size, _: i64, _: $size, _: i32, _: i32,
        ) -> i32 {
            needs_context(stringify!($batch), &[handle.0], |_| 0)
        }
    )*};
}

products! {
    gemm_ex, gemm_strided_batched_ex: i32;
    gemm_ex_64, gemm_strided_batched_ex_64: i64;
}

static CALLS: Calls = Calls {
    stream_query,
    stream_synchronize,
    stream_create_with_priority,
    stream_destroy,
    stream_wait_event,
    get_stream_priority_range,
    event_create,
    event_destroy,
    event_record,
    event_query,
    event_synchronize,
    event_elapsed_time,
    device_synchronize,
    mem_alloc,
    mem_free,
    mem_get_info,
    memcpy_htod_async,
    memcpy_dtoh_async,
    memcpy_dtod_async,
    memset_d8_async,
    memset_d16_async,
    memset_d32_async,
    mem_host_alloc,
    mem_free_host,
    mem_host_register,
    mem_host_unregister,
    mem_host_get_device_pointer,
    mem_alloc_async: Some(mem_alloc_async),
    mem_free_async: Some(mem_free_async),
    device_get_default_mem_pool: Some(device_get_default_mem_pool),
    mem_pool_set_attribute: Some(mem_pool_set_attribute),
    mem_pool_trim_to: Some(mem_pool_trim_to),
    stream_begin_capture: Some(stream_begin_capture),
    stream_end_capture: Some(stream_end_capture),
    stream_is_capturing: Some(stream_is_capturing),
    thread_exchange_stream_capture_mode: Some(thread_exchange_stream_capture_mode),
    graph_instantiate_with_flags: Some(graph_instantiate_with_flags),
    graph_launch: Some(graph_launch),
    graph_destroy: Some(graph_destroy),
    graph_exec_destroy: Some(graph_exec_destroy),
    ipc_get_mem_handle: Some(ipc_get_mem_handle),
    ipc_open_mem_handle: Some(ipc_open_mem_handle),
    ipc_close_mem_handle: Some(ipc_close_mem_handle),
    mem_get_address_range: Some(mem_get_address_range),
    ipc_get_event_handle: Some(ipc_get_event_handle),
    ipc_open_event_handle: Some(ipc_open_event_handle),
};

static BLAS: Blas = Blas {
    calls: BlasCalls {
        create: blas_create,
        destroy: blas_destroy,
        set_stream: blas_set_stream,
        set_atomics_mode: blas_set_atomics_mode,
        set_pointer_mode: blas_set_pointer_mode,
        set_workspace: Some(blas_set_workspace),
        set_math_mode: Some(blas_set_math_mode),
        gemm_ex,
        gemm_strided_batched_ex,
        gemm_ex_64: Some(gemm_ex_64),
        gemm_strided_batched_ex_64: Some(gemm_strided_batched_ex_64),
    },
    codes: &CODES,
};

/// The fake as a platform.
#[derive(Debug)]
pub(super) struct FakePlatform(&'static Quirks);

// SAFETY: The driver state frees no real memory here, because nothing dereferences the addresses.
unsafe impl Platform for FakePlatform {
    /// The context that was current.
    type Previous = u64;

    fn calls(&self) -> &Calls {
        &CALLS
    }

    fn codes(&self) -> &'static Codes {
        &CODES
    }

    fn quirks(&self) -> &'static Quirks {
        self.0
    }

    fn blas(&self) -> &Blas {
        &BLAS
    }

    fn make_current(&self, device: u32) -> Result<Option<u64>, i32> {
        match call("make_current", &[], |_| 0) {
            0 => Ok(Some(CURRENT.replace(context(device)))),
            code => Err(code),
        }
    }

    fn restore(&self, previous: u64) {
        CURRENT.set(previous);
    }

    fn enable_peer_access(&self, _device: u32, _peer: u32) -> Result<(), i32> {
        match needs_context("enable_peer_access", &[], |_| 0) {
            0 => Ok(()),
            code => Err(code),
        }
    }

    unsafe fn memcpy_peer_async(
        &self,
        _dst: (u32, DevicePtr),
        _src: (u32, DevicePtr),
        _bytes: usize,
        stream: RawStream,
    ) -> i32 {
        call("memcpy_peer_async", &[stream.0], |_| 0)
    }

    unsafe fn memcpy_2d_async(&self, _copy: &MemoryCopy2d, stream: RawStream) -> i32 {
        needs_context("memcpy_2d_async", &[stream.0], |_| 0)
    }

    unsafe fn stream_is_of(&self, stream: RawStream, _device: u32) -> Result<bool, i32> {
        match call("stream_is_of", &[stream.0], |_| 0) {
            0 => Ok(true),
            code => Err(code),
        }
    }

    fn allocate_shared(&self, _device: u32, _transport: Transport, bytes: usize) -> Result<SharedBlock> {
        let mut address = 0;
        let code = needs_context("allocate_shared", &[], |vendor| {
            address = vendor.made("allocate_shared");
            0
        });
        CODES.check("allocate", code).map(|()| SharedBlock {
            address: DevicePtr::new(address),
            allocation: address,
            bytes,
        })
    }

    unsafe fn free_shared(&self, operation: &'static str, block: &SharedBlock) -> Result<()> {
        CODES.check(operation, destroy("free_shared", block.address.get()))
    }

    fn export_shared(&self, block: &SharedBlock, transport: Transport, handle: MemoryHandle) -> Result<MemoryHandle> {
        CODES.check("export_memory", call("export_shared", &[block.address.get()], |_| 0))?;
        match transport {
            Transport::Fabric => Ok(handle),
            _ => {
                let file = std::fs::File::open("/dev/null").map_err(|error| {
                    highwater_hal::Error::new(ErrorKind::OperatingSystem, "export_memory", error.to_string())
                })?;
                Ok(handle.with_descriptor(highwater_hal::Descriptor::new(file.into())))
            }
        }
    }

    fn reserve_addresses(&self, _device: u32, _bytes: usize) -> Result<DevicePtr> {
        let mut address = 0;
        let code = needs_context("reserve_addresses", &[], |vendor| {
            address = vendor.made("reserve_addresses");
            0
        });
        CODES.check("reserve_addresses", code).map(|()| DevicePtr::new(address))
    }

    unsafe fn free_addresses(&self, ptr: DevicePtr, _bytes: usize) -> Result<()> {
        CODES.check("free_addresses", destroy("free_addresses", ptr.get()))
    }

    fn create_memory(&self, _device: u32, _options: &PhysicalMemoryOptions) -> Result<u64> {
        let mut memory = 0;
        let code = needs_context("create_memory", &[], |vendor| {
            memory = vendor.made("create_memory");
            0
        });
        CODES.check("create_memory", code).map(|()| memory)
    }

    unsafe fn release_memory(&self, allocation: u64) -> Result<()> {
        CODES.check("destroy_memory", destroy("release_memory", allocation))
    }

    unsafe fn map_memory(&self, _ptr: DevicePtr, _bytes: usize, allocation: u64) -> Result<()> {
        CODES.check("map_memory", needs_context("map_memory", &[allocation], |_| 0))
    }

    unsafe fn set_memory_access(&self, _ptr: DevicePtr, _bytes: usize, _accessing: u32) -> Result<()> {
        CODES.check("set_memory_access", needs_context("set_memory_access", &[], |_| 0))
    }

    unsafe fn unmap_memory(&self, _ptr: DevicePtr, _bytes: usize) -> Result<()> {
        CODES.check("unmap_memory", needs_context("unmap_memory", &[], |_| 0))
    }

    fn open_shared(&self, _device: u32, handle: &MemoryHandle) -> Result<SharedBlock> {
        let mut address = 0;
        let code = needs_context("open_shared", &[], |vendor| {
            address = vendor.made("open_shared");
            0
        });
        CODES.check("open_memory", code).map(|()| SharedBlock {
            address: DevicePtr::new(address),
            allocation: address,
            bytes: handle.bytes as usize,
        })
    }
}

/// A backend over the fake. No other test has one at the same time.
pub(super) struct Fake {
    pub(super) backend: Arc<DriverBackend<FakePlatform>>,
    _turn: MutexGuard<'static, ()>,
}

impl Fake {
    /// Creates a backend over two devices with all capabilities.
    pub(super) fn new() -> Self {
        Self::of(&QUIRKS)
    }

    /// Creates a backend over a vendor whose streams die with a lost capture.
    pub(super) fn mortal() -> Self {
        Self::of(&MORTAL)
    }

    fn of(quirks: &'static Quirks) -> Self {
        let turn = TURN.lock();
        *VENDOR.lock() = Vendor { follows: quirks.events_follow_streams, ..Vendor::default() };
        let mut can = Capabilities::none();
        (can.gemm_f32, can.blas_workspace, can.strided_batch, can.atomics_mode) = (true, true, true, true);
        (can.capture, can.stream_ordered_memory, can.shareable_memory) = (true, true, true);
        (can.interprocess_events, can.event_timing, can.stream_priority, can.peer_copy) = (true, true, true, true);
        (can.host_register, can.write_combined, can.foreign_objects) = (true, true, true);
        can.host_register_read_only = true;
        (can.legacy_default_stream, can.per_thread_default_stream) = (true, true);
        (can.mapped_memory, can.mapped_memory_granularity) = (true, GRANULARITY);
        can.ipc_transports =
            Transports::NONE.with(Transport::Legacy).with(Transport::Descriptor).with(Transport::Fabric);
        let devices =
            (0..2).map(|device| (DeviceInfo::new(device, "fake", [device as u8; 16], 1 << 30), can)).collect();
        let identity = Identity::new("fake", "Fake", BackendTag::next());
        let backend = Arc::new(DriverBackend::new(Opened {
            platform: FakePlatform(quirks),
            identity,
            devices,
            captures: Arc::new(Captures::new(2)),
        }));
        VENDOR.lock().state = Arc::downgrade(backend.state());
        Self { backend, _turn: turn }
    }

    /// Makes the next call of that name return `code` and do nothing.
    pub(super) fn answer(&self, name: &'static str, code: i32) {
        VENDOR.lock().answers.entry(name).or_default().push_back(code);
    }

    /// Makes the calls of that name succeed and return no object.
    pub(super) fn give_nothing(&self, name: &'static str) {
        VENDOR.lock().nothing.insert(name);
    }

    /// Makes the calls of that name wait until `go_on`.
    pub(super) fn hold_up(&self, name: &'static str) {
        VENDOR.lock().waits.insert(name);
    }

    pub(super) fn go_on(&self, name: &'static str) {
        VENDOR.lock().waits.remove(name);
        CHANGED.notify_all();
    }

    /// Waits until a call of that name waits.
    pub(super) fn wait_for(&self, name: &'static str) {
        let mut vendor = VENDOR.lock();
        while !vendor.waiting.contains(name) {
            CHANGED.wait(&mut vendor);
        }
    }

    /// Creates an object of foreign code.
    pub(super) fn foreign(&self) -> u64 {
        VENDOR.lock().made("foreign")
    }

    /// Destroys an object of foreign code.
    pub(super) fn destroy_foreign(&self, object: u64) {
        VENDOR.lock().alive.remove(&object);
    }

    /// Ends a stream's capture without the backend.
    pub(super) fn end_foreign_capture(&self, stream: u64) {
        VENDOR.lock().captures.remove(&stream);
    }

    /// Loses the capture that began on a stream.
    pub(super) fn lose(&self, origin: u64) {
        VENDOR.lock().kill(origin);
    }

    /// Sets whether ends of captures report that a stream was not joined.
    pub(super) fn leave_unjoined(&self, unjoined: bool) {
        VENDOR.lock().unjoined = unjoined;
    }

    /// Returns the stream on which the event was last recorded.
    pub(super) fn recorded_on(&self, event: u64) -> Option<u64> {
        VENDOR.lock().records_made.iter().rev().find(|record| record.0 == event).map(|record| record.1)
    }

    /// Returns the event and the stream of the last record.
    pub(super) fn last_record(&self) -> Option<(u64, u64)> {
        VENDOR.lock().records_made.last().copied()
    }

    /// Returns the events that a stream waits for.
    pub(super) fn waits_of(&self, stream: u64) -> Vec<u64> {
        VENDOR.lock().waits_made.iter().filter(|wait| wait.0 == stream).map(|wait| wait.1).collect()
    }

    /// Returns the priority of a stream.
    pub(super) fn priority_of(&self, stream: u64) -> Option<i32> {
        VENDOR.lock().streams_made.iter().find(|made| made.0 == stream).map(|made| made.1)
    }

    /// Returns the streams that a handle was bound to, in order.
    pub(super) fn bindings_of(&self, handle: u64) -> Vec<u64> {
        VENDOR.lock().bound.iter().filter(|bound| bound.0 == handle).map(|bound| bound.1).collect()
    }

    /// Returns the flags of the registrations so far.
    pub(super) fn register_flags(&self) -> Vec<u32> {
        VENDOR.lock().register_flags.clone()
    }

    /// Returns whether the object is alive.
    pub(super) fn is_alive(&self, object: u64) -> bool {
        VENDOR.lock().alive.contains(&object)
    }

    /// Returns the logged calls of that name.
    pub(super) fn calls(&self, name: &str) -> Vec<Call> {
        VENDOR.lock().calls.iter().filter(|call| call.name == name).copied().collect()
    }

    /// Checks that no object is live except the backend's own streams, which are destroyed with the backend.
    #[track_caller]
    pub(super) fn is_empty(&self) {
        let own = self.backend.state().own_streams();
        assert_eq!((self.backend.live_objects().total(), self.alive() - own), (0, 0));
    }

    /// Returns the number of live objects.
    pub(super) fn alive(&self) -> usize {
        VENDOR.lock().alive.len()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        VENDOR.lock().waits.clear();
        CHANGED.notify_all();
        if !std::thread::panicking() {
            assert_eq!((CURRENT.get(), MODE.get()), (0, 0), "context or capture mode were not put back");
            assert_eq!(VENDOR.lock().faults, Vec::<String>::new());
        }
    }
}
