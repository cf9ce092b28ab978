//! [`DriverBackend`]: the trait `Backend` over a vendor's table of calls.

use std::path::PathBuf;
use std::sync::Arc;

use super::blas::DriverBlas;
use super::calls::{capture_mode, capture_status};
use super::host::DriverHost;
use super::ipc::DriverIpc;
use super::lt::LtBlas;
use super::objects::with_number;
use super::platform::MAX_PITCH;
use super::platform::{Opened, Platform};
use super::raw::{RawEvent, RawGraph, RawGraphExec, RawStream};
use super::search::Search;
use super::state::{
    self, Block, BlockKind, CAPTURES, DriverState, EXPOSED, FOREIGN, HIGH, HeldStream, INTERPROCESS, LOW, TIMING,
    wrong_device,
};
use super::thread_records;
use super::turns::Family;
use highwater_hal::{
    AllocateOptions, Backend, BlasHandle, BlasKind, BlasOptions, Capabilities, CaptureMode, Completion, DeviceInfo,
    DeviceMemoryKind, DevicePtr, Error, ErrorKind, EventId, EventOptions, FillPattern, GraphExecId, GraphId,
    HostAllocator, Identity, IpcSharing, LiveObjects, Location, MemoryCopy, MemoryCopy2d, MemoryFill, MemoryInfo,
    MemoryRange, PhysicalMemoryId, PhysicalMemoryOptions, Result, StreamId, StreamOptions, StreamPriority, Transport,
    Unavailable,
};

/// A backend over a vendor's driver.
///
/// BLAS handles, the host allocator and the sharing keep the shared state alive.
#[derive(Debug)]
pub struct DriverBackend<P: Platform> {
    state: Arc<DriverState<P>>,
    host: Arc<DriverHost<P>>,
    ipc: Option<Arc<DriverIpc<P>>>,
}

impl<P: Platform> DriverBackend<P> {
    /// Creates the backend over an opened vendor.
    #[must_use]
    pub fn new(opened: Opened<P>) -> Self {
        let shares = opened.devices.iter().any(|(_, capabilities)| !capabilities.ipc_transports.is_empty());
        let state = Arc::new(DriverState::new(opened));
        let host = Arc::new(DriverHost::new(Arc::clone(&state)));
        let ipc = shares.then(|| Arc::new(DriverIpc::new(Arc::clone(&state))));
        Self { state, host, ipc }
    }

    /// Returns the state that the backend shares with its handles.
    #[must_use]
    pub const fn state(&self) -> &Arc<DriverState<P>> {
        &self.state
    }

    fn same_device(operation: &'static str, stream: StreamId, what: &str, device: u32) -> Result<()> {
        if stream.device() == device { Ok(()) } else { Err(wrong_device(operation, stream, what, device)) }
    }

    /// Makes the vendor's call, and repeats it after trimming the pool if memory was exhausted.
    fn with_trimmed_pool(&self, device: u32, mut call: impl FnMut() -> i32) -> i32 {
        let code = call();
        if code == self.state.platform.quirks().out_of_memory && self.state.trim_pool(device) { call() } else { code }
    }

    fn event_flags(&self, options: &EventOptions) -> (u32, u64) {
        let vendor = self.state.platform.quirks().event_flags;
        match (options.timing, options.interprocess) {
            (true, _) => (vendor.timing, TIMING),
            (_, true) => (vendor.interprocess, INTERPROCESS),
            _ => (vendor.plain, 0),
        }
    }
}

/// Opens a backend over what `find` finds. The identity lists the files that the search opened.
///
/// # Errors
/// The error of `find`, with an account of the search.
pub fn open_backend<P: Platform>(
    folders: Vec<PathBuf>,
    find: impl FnOnce(&mut Search) -> Result<Opened<P>>,
) -> Result<Arc<dyn Backend>, Unavailable> {
    let mut search = Search::new(folders);
    match find(&mut search) {
        Ok(mut opened) => {
            let files = search.opened().iter().map(|file| ("library".to_owned(), file.clone()));
            opened.identity.versions.extend(files);
            Ok(Arc::new(DriverBackend::new(opened)))
        }
        Err(error) => Err(search.fails(error)),
    }
}

#[cold]
fn interprocess_in_capture(operation: &'static str) -> Error {
    Error::new(ErrorKind::Capture, operation, "an interprocess event cannot be recorded in a capture")
        .with_hint("record the event before or after the capture; the capture is still open")
}

/// Returns an optional call, which a device with the capability `ability` has.
fn required<T>(operation: &'static str, call: Option<T>, ability: &str) -> Result<T> {
    call.ok_or_else(|| Error::lacks(operation, ability))
}

// SAFETY: Streams, events and copies are the vendor's own. They keep the order of streams, and queries report it, as
// the author of the `Platform` promises. An id names one vendor handle, which no call uses after its destruction.
unsafe impl<P: Platform> Backend for DriverBackend<P> {
    fn identity(&self) -> &Identity {
        &self.state.identity
    }

    fn device_count(&self) -> u32 {
        self.state.devices.len() as u32
    }

    fn device_info(&self, device: u32) -> Result<DeviceInfo> {
        self.state.enter("device_info")?;
        Ok(self.state.device("device_info", device)?.info.clone())
    }

    fn capabilities(&self, device: u32) -> Result<Capabilities> {
        self.state.enter("capabilities")?;
        Ok(self.state.device("capabilities", device)?.capabilities)
    }

    fn memory_info(&self, device: u32) -> Result<MemoryInfo> {
        const OPERATION: &str = "memory_info";
        let state = &*self.state;
        state.enter(OPERATION)?;
        let total = state.device(OPERATION, device)?.info.memory_bytes;
        let _relaxed = state.relaxed();
        let _current = state.make_current(OPERATION, device)?;
        let (mut free, mut seen) = (0, 0);
        // SAFETY: The call writes two numbers, which outlive it.
        state.check(OPERATION, unsafe { (state.platform.calls().mem_get_info)(&mut free, &mut seen) })?;
        Ok(MemoryInfo { free: (free as u64).min(total), total })
    }

    fn live_objects(&self) -> LiveObjects {
        let state = &*self.state;
        let mut live = LiveObjects::default();
        // A child owns nothing of its parent, and a lock may be held by a thread that the child lacks.
        if !state.is_own_process() {
            return live;
        }
        if state.is_in_service() {
            state.sweep("live_objects");
        }
        live.streams = state.streams.live().saturating_sub(state.streams.live_with(FOREIGN));
        live.events = state.events.live().saturating_sub(state.events.live_with(FOREIGN));
        live.graphs = state.graphs.live() + state.graph_execs.live();
        // Objects that a call still uses are not destroyed.
        live.streams += state.streams.put_off_without(FOREIGN);
        live.events += state.events.put_off_without(FOREIGN);
        live.graphs += state.graphs.put_off_without(FOREIGN) + state.graph_execs.put_off_without(FOREIGN);
        live.handles = state.live_handles();
        live.allocations = state.blocks.lock().len() as u64;
        live.host_allocations = state.host_blocks.lock().len() as u64;
        live.mappings = state.mapped.lock().len() as u64;
        live.reservations = state.mapped_memory.lock().reservations();
        live.physical_memory = state.physical_memory.len() as u64;
        let mut exported = state.exported.lock();
        exported.retain(|descriptor| descriptor.is_open());
        live.descriptors = exported.len() as u64;
        live
    }

    fn is_exiting(&self) -> bool {
        highwater_hal::exit::has_begun()
    }

    // ------------------------------------------------------------------ streams

    fn create_stream(&self, device: u32, options: &StreamOptions) -> Result<StreamId> {
        const OPERATION: &str = "create_stream";
        let state = &*self.state;
        state.enter(OPERATION)?;
        state.device(OPERATION, device)?;
        if options.priority != StreamPriority::Normal {
            self.state.require(OPERATION, device, |can| can.stream_priority, "stream_priority")?;
        }
        state.streams.sweep(|stream| state.destroy_raw_stream(OPERATION, stream));
        let raw = state.make_stream(OPERATION, device, options.priority)?;
        let flags = match options.priority {
            StreamPriority::Low => LOW,
            StreamPriority::Normal => 0,
            StreamPriority::High => HIGH,
        };
        state.streams.insert(OPERATION, device, raw, flags).inspect_err(|_| {
            // SAFETY: No other code knows the stream.
            unsafe { (state.platform.calls().stream_destroy)(raw) };
        })
    }

    fn destroy_stream(&self, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "destroy_stream";
        let state = &*self.state;
        state.enter(OPERATION)?;
        if stream.is_legacy_default() || stream.is_per_thread_default() {
            state.stream(OPERATION, stream)?;
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, "a default stream cannot be destroyed")
                .with_hint("destroy only streams that `create_stream` returned"));
        }
        if state.events_follow() {
            let held = state.stream(OPERATION, stream)?;
            // The end of a foreign stream's id waits for the stream's work, which a capture forbids.
            if held.flags() & (FOREIGN | CAPTURES) == FOREIGN | CAPTURES {
                state.refuse_in_capture(OPERATION, &held)?;
            }
        }
        // The owner of a foreign stream may destroy it from here on.
        state.streams.remove(OPERATION, stream, FOREIGN, |removed| state.destroy_raw_stream(OPERATION, removed))
    }

    fn query_stream(&self, stream: StreamId) -> Result<Completion> {
        const OPERATION: &str = "query_stream";
        let state = &*self.state;
        state.enter(OPERATION)?;
        let asking = thread_records::ask();
        let held = state.stream(OPERATION, stream)?;
        state.refuse_in_capture(OPERATION, &held)?;
        let _current = state.current_for(OPERATION, &held, stream.device())?;
        // A default stream has no hazard pointer, so no fence publishes the query.
        let _relaxed = state.relaxed_if_capturing(Some(&asking).filter(|_| !held.is_default()));
        // SAFETY: The stream is held.
        state.answer(OPERATION, unsafe { (state.platform.calls().stream_query)(held.raw()) })
    }

    fn synchronize_stream(&self, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "synchronize_stream";
        let state = &*self.state;
        state.enter(OPERATION)?;
        let held = state.stream(OPERATION, stream)?;
        state.refuse_in_capture(OPERATION, &held)?;
        let _current = state.current_for(OPERATION, &held, stream.device())?;
        let _relaxed = state.relaxed();
        // SAFETY: The stream is held.
        state.check(OPERATION, unsafe { (state.platform.calls().stream_synchronize)(held.raw()) })
    }

    fn synchronize_device(&self, device: u32) -> Result<()> {
        const OPERATION: &str = "synchronize_device";
        let state = &*self.state;
        state.enter(OPERATION)?;
        state.device(OPERATION, device)?;
        if state.captures.are_open_on(device) {
            return Err(Error::new(ErrorKind::Capture, OPERATION, "a stream of the device has an open capture")
                .with_hint("end the capture first, or synchronize with single streams"));
        }
        let _relaxed = state.relaxed();
        let _current = state.make_current(OPERATION, device)?;
        // SAFETY: The call takes no argument.
        state.check(OPERATION, unsafe { (state.platform.calls().device_synchronize)() })
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        const OPERATION: &str = "stream_wait_event";
        let state = &*self.state;
        state.enter(OPERATION)?;
        if state.events_follow() {
            return state.stream_waits_for_followed(OPERATION, stream, event);
        }
        let home = event.device();
        let (held, event) = state.stream_and_event(OPERATION, stream, event)?;
        if home != stream.device() && event.flags() & (INTERPROCESS | FOREIGN) != 0 {
            return state.wait_across_devices(OPERATION, (&held, stream.device()), (&event, home));
        }
        let _current = state.current_for(OPERATION, &held, stream.device())?;
        // SAFETY: Both are held.
        state.check(OPERATION, unsafe { (state.platform.calls().stream_wait_event)(held.raw(), event.raw(), 0) })
    }

    fn raw_stream(&self, stream: StreamId) -> Result<u64> {
        const OPERATION: &str = "raw_stream";
        self.state.enter(OPERATION)?;
        let held = self.state.stream(OPERATION, stream)?;
        self.state.require(OPERATION, stream.device(), |can| can.foreign_objects, "foreign_objects")?;
        Ok(held.raw().0)
    }

    unsafe fn stream_from_raw(&self, device: u32, raw: u64) -> Result<StreamId> {
        const OPERATION: &str = "stream_from_raw";
        let state = &*self.state;
        state.enter(OPERATION)?;
        self.state.require(OPERATION, device, |can| can.foreign_objects, "foreign_objects")?;
        let (quirks, raw) = (state.platform.quirks(), RawStream(raw));
        // In both vendors, handles up to 2 name default streams.
        if raw.0 <= 2 || raw == quirks.legacy_stream || raw == quirks.per_thread_stream {
            let hint = if raw == quirks.per_thread_stream {
                "use `StreamId::per_thread_default`, or `Device::per_thread_default_stream`"
            } else {
                "use `StreamId::legacy_default`, or `Device::legacy_default_stream`"
            };
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                OPERATION,
                format!("the handle {} names a default stream, expected a created one", raw.0),
            )
            .with_hint(hint));
        }
        // SAFETY: The caller promises that the stream is alive.
        match unsafe { state.platform.stream_is_of(raw, device) } {
            Ok(true) => {}
            Ok(false) => {
                let message = format!("the stream {:#x} does not belong to device {device}", raw.0);
                return Err(Error::new(ErrorKind::WrongDevice, OPERATION, message)
                    .with_hint("pass the device on which the stream was created"));
            }
            Err(code) => return Err(state.platform.codes().error(OPERATION, code)),
        }
        state.note_foreign();
        state.streams.insert(OPERATION, device, raw, FOREIGN)
    }

    // ------------------------------------------------------------------ events

    fn create_event(&self, device: u32, options: &EventOptions) -> Result<EventId> {
        const OPERATION: &str = "create_event";
        let state = &*self.state;
        state.enter(OPERATION)?;
        state.device(OPERATION, device)?;
        if options.timing && options.interprocess {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                OPERATION,
                "the options ask for timing and interprocess, expected at most one of them",
            ));
        }
        if options.timing {
            self.state.require(OPERATION, device, |can| can.event_timing, "event_timing")?;
        }
        if options.interprocess {
            self.state.require(OPERATION, device, |can| can.interprocess_events, "interprocess_events")?;
        }
        state.events.sweep(|event| state.destroy_raw_event(OPERATION, event));
        let (vendor_flags, flags) = self.event_flags(options);
        let _relaxed = state.relaxed();
        let _current = state.make_current(OPERATION, device)?;
        let mut raw = RawEvent::NULL;
        // SAFETY: The call writes one number, which outlives it.
        state.check(OPERATION, unsafe { (state.platform.calls().event_create)(&mut raw, vendor_flags) })?;
        state.made(OPERATION, raw)?;
        state.events.insert(OPERATION, device, raw, flags).inspect_err(|_| {
            // SAFETY: No other code knows the event.
            unsafe { (state.platform.calls().event_destroy)(raw) };
        })
    }

    fn destroy_event(&self, event: EventId) -> Result<()> {
        const OPERATION: &str = "destroy_event";
        let state = &*self.state;
        state.enter(OPERATION)?;
        state.events.remove(OPERATION, event, FOREIGN, |removed| state.destroy_raw_event(OPERATION, removed))
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "record_event";
        let state = &*self.state;
        state.enter(OPERATION)?;
        let (held, mark) = state.stream_and_event(OPERATION, stream, event)?;
        Self::same_device(OPERATION, stream, "the event", event.device())?;
        if mark.flags() & INTERPROCESS != 0 && state.takes_part(OPERATION, &held)? {
            return Err(interprocess_in_capture(OPERATION));
        }
        if state.events_follow() {
            drop((held, mark));
            return state.record_followed(OPERATION, event, stream);
        }
        let _current = state.current_for(OPERATION, &held, stream.device())?;
        // SAFETY: Both are held.
        state.check(OPERATION, unsafe { (state.platform.calls().event_record)(mark.raw(), held.raw()) })
    }

    fn query_event(&self, event: EventId) -> Result<Completion> {
        const OPERATION: &str = "query_event";
        let state = &*self.state;
        state.enter(OPERATION)?;
        if state.events_follow() {
            return state.query_followed(OPERATION, event);
        }
        let asking = thread_records::ask();
        let mark = state.events.hold(OPERATION, event)?;
        let _relaxed = state.relaxed_if_capturing(Some(&asking));
        // SAFETY: The event is held.
        state.answer(OPERATION, unsafe { (state.platform.calls().event_query)(mark.raw()) })
    }

    fn synchronize_event(&self, event: EventId) -> Result<()> {
        const OPERATION: &str = "synchronize_event";
        let state = &*self.state;
        state.enter(OPERATION)?;
        if state.events_follow() {
            return state.wait_for_followed(OPERATION, event);
        }
        let mark = state.events.hold(OPERATION, event)?;
        let _relaxed = state.relaxed();
        // SAFETY: The event is held.
        state.check(OPERATION, unsafe { (state.platform.calls().event_synchronize)(mark.raw()) })
    }

    fn event_elapsed_ns(&self, start: EventId, end: EventId) -> Result<u64> {
        const OPERATION: &str = "event_elapsed_ns";
        let state = &*self.state;
        state.enter(OPERATION)?;
        let (first, last) = (state.events.hold(OPERATION, start)?, state.events.hold(OPERATION, end)?);
        self.state.require(OPERATION, start.device(), |can| can.event_timing, "event_timing")?;
        for (id, held) in [(start, &first), (end, &last)] {
            if held.flags() & (TIMING | FOREIGN) == 0 {
                return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, format!("the {id} has no timing"))
                    .with_hint("create both events with `EventOptions::with_timing`"));
            }
        }
        if start.device() != end.device() {
            let message = format!("the {start} and the {end} belong to different devices, expected one device");
            return Err(Error::new(ErrorKind::WrongDevice, OPERATION, message));
        }
        let _relaxed = state.relaxed();
        let mut milliseconds = 0.0_f32;
        let quirks = state.platform.quirks();
        // SAFETY: Both events are held, and the call writes one number, which outlives it.
        match unsafe { (state.platform.calls().event_elapsed_time)(&mut milliseconds, first.raw(), last.raw()) } {
            // A negative time, of an end before its start, becomes 0.
            0 => Ok((f64::from(milliseconds) * 1e6) as u64),
            code if code == quirks.not_ready => {
                Err(Error::new(ErrorKind::InvalidState, OPERATION, "one of the events is not done yet")
                    .with_code(i64::from(code))
                    .with_hint("synchronize with the later event first"))
            }
            code if code == quirks.no_elapsed_time => {
                Err(Error::new(ErrorKind::InvalidArgument, OPERATION, "one of the events was never recorded")
                    .with_code(i64::from(code))
                    .with_hint("record both events first"))
            }
            code => Err(state.platform.codes().error(OPERATION, code)),
        }
    }

    fn raw_event(&self, event: EventId) -> Result<u64> {
        const OPERATION: &str = "raw_event";
        self.state.enter(OPERATION)?;
        let held = self.state.events.hold(OPERATION, event)?;
        self.state.require(OPERATION, event.device(), |can| can.foreign_objects, "foreign_objects")?;
        if self.state.events_follow() {
            held.set_flag(EXPOSED, true);
        }
        Ok(held.raw().0)
    }

    unsafe fn event_from_raw(&self, device: u32, raw: u64) -> Result<EventId> {
        const OPERATION: &str = "event_from_raw";
        let state = &*self.state;
        state.enter(OPERATION)?;
        self.state.require(OPERATION, device, |can| can.foreign_objects, "foreign_objects")?;
        if raw == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, "the handle is 0, expected an event"));
        }
        state.note_foreign();
        state.events.insert(OPERATION, device, RawEvent(raw), FOREIGN)
    }

    // ------------------------------------------------------------------ device memory

    fn allocate(&self, device: u32, options: &AllocateOptions) -> Result<DevicePtr> {
        const OPERATION: &str = "allocate";
        let state = &*self.state;
        state.enter(OPERATION)?;
        let device_state = state.device(OPERATION, device)?;
        let &AllocateOptions { bytes, kind, .. } = options;
        let transport = match kind {
            DeviceMemoryKind::Plain => None,
            DeviceMemoryKind::Shareable(transport) => {
                if !device_state.capabilities.shareable_memory {
                    return Err(Error::lacks(OPERATION, "shareable_memory"));
                }
                if !device_state.capabilities.ipc_transports.contains(transport) {
                    return Err(super::ipc::unsupported(OPERATION, transport));
                }
                Some(transport)
            }
            DeviceMemoryKind::StreamOrdered(stream) => return self.allocate_in_order(device, stream, bytes),
            _ => return Err(Error::unknown(OPERATION, &kind)),
        };
        check_size(OPERATION, bytes, device_state.info.memory_bytes)?;
        let calls = state.platform.calls();
        let _relaxed = state.relaxed();
        let _current = state.make_current(OPERATION, device)?;
        let (address, kind) = match transport {
            Some(transport @ (Transport::Descriptor | Transport::Fabric)) => {
                let block = state.platform.allocate_shared(device, transport, bytes).or_else(|error| {
                    if error.kind() == ErrorKind::OutOfMemory && state.trim_pool(device) {
                        state.platform.allocate_shared(device, transport, bytes)
                    } else {
                        Err(error)
                    }
                })?;
                // Identifies the allocation among those of all processes.
                let token = match highwater_hal::random(OPERATION) {
                    Ok(token) => token,
                    Err(error) => {
                        // SAFETY: No other code knows the block.
                        unsafe { state.platform.free_shared(OPERATION, &block) }?;
                        return Err(error);
                    }
                };
                (block.address, BlockKind::Shared { transport, token, block })
            }
            plain => {
                let mut address = DevicePtr::new(0);
                // SAFETY: The call writes one number, which outlives it.
                let code = self.with_trimmed_pool(device, || unsafe { (calls.mem_alloc)(&mut address, bytes) });
                state.check(OPERATION, code)?;
                (address, if plain.is_some() { BlockKind::Legacy } else { BlockKind::Plain })
            }
        };
        state.made(OPERATION, address)?;
        state.blocks.lock().insert(address, Block { device, bytes, kind });
        Ok(address)
    }

    unsafe fn free(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        const OPERATION: &str = "free";
        let state = &*self.state;
        state.enter(OPERATION)?;
        state.device(OPERATION, device)?;
        let held = stream.map(|stream| state.stream(OPERATION, stream)).transpose()?;
        if let Some(stream) = stream {
            Self::same_device(OPERATION, stream, "the memory", device)?;
        }
        if let Some(held) = &held {
            // The graph would free the block at each launch, and without a launch it would never be freed.
            state.refuse_in_capture(OPERATION, held)?;
        }
        let block = {
            let mut blocks = state.blocks.lock();
            let found = blocks.get(&ptr).filter(|block| block.device == device);
            let Some(found) = found else {
                let message = format!("{ptr} is not the start of a live block of device {device}");
                return Err(Error::new(ErrorKind::InvalidPointer, OPERATION, message)
                    .with_hint("free each address of `allocate` once, on its own device"));
            };
            let ordered = matches!(found.kind, BlockKind::StreamOrdered);
            if ordered != stream.is_some() {
                let message = if ordered {
                    "the memory is stream-ordered and no stream was passed, expected the stream to free it on"
                } else {
                    "the memory is not stream-ordered and a stream was passed, expected none"
                };
                return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message));
            }
            // Removed from the table before it is freed, because the address can be issued again as soon as it is free.
            let Some(block) = blocks.remove(&ptr) else { return Ok(()) };
            block
        };
        let calls = state.platform.calls();
        let outcome = (|| {
            let _relaxed = state.relaxed();
            let _current = state.make_current(OPERATION, device)?;
            // SAFETY: The caller promises that nothing uses the block, beyond work that precedes the free on the
            // stream.
            unsafe {
                match (&block.kind, &held) {
                    (BlockKind::Shared { block, .. }, _) => state.platform.free_shared(OPERATION, block),
                    (BlockKind::StreamOrdered, Some(held)) => {
                        let free = required(OPERATION, calls.mem_free_async, "stream_ordered_memory")?;
                        state.check(OPERATION, free(ptr, held.raw()))
                    }
                    _ => state.check(OPERATION, (calls.mem_free)(ptr)),
                }
            }
        })();
        if outcome.is_err() {
            state.blocks.lock().insert(ptr, block);
        }
        outcome
    }

    // ------------------------------------------------------------------ mapped memory

    fn describe_memory(&self, device: u32, ptr: DevicePtr) -> Result<MemoryRange> {
        self.state.describe_memory(device, ptr)
    }

    fn reserve_addresses(&self, device: u32, bytes: usize) -> Result<DevicePtr> {
        self.state.reserve_addresses(device, bytes)
    }

    unsafe fn free_addresses(&self, device: u32, ptr: DevicePtr, bytes: usize) -> Result<()> {
        // SAFETY: As the caller promises, here and below.
        unsafe { self.state.free_addresses(device, ptr, bytes) }
    }

    fn create_memory(&self, device: u32, options: &PhysicalMemoryOptions) -> Result<PhysicalMemoryId> {
        self.state.create_memory(device, options)
    }

    fn destroy_memory(&self, memory: PhysicalMemoryId) -> Result<()> {
        self.state.destroy_memory(memory)
    }

    unsafe fn map_memory(&self, device: u32, ptr: DevicePtr, memory: PhysicalMemoryId) -> Result<()> {
        // SAFETY: As above.
        unsafe { self.state.map_memory(device, ptr, memory) }
    }

    unsafe fn set_memory_access(&self, device: u32, ptr: DevicePtr, bytes: usize, accessing: u32) -> Result<()> {
        // SAFETY: As above.
        unsafe { self.state.set_memory_access(device, ptr, bytes, accessing) }
    }

    unsafe fn unmap_memory(&self, device: u32, ptr: DevicePtr, bytes: usize) -> Result<()> {
        // SAFETY: As above.
        unsafe { self.state.unmap_memory(device, ptr, bytes) }
    }

    // ------------------------------------------------------------------ copies and fills

    unsafe fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "copy";
        let state = &*self.state;
        state.enter(OPERATION)?;
        let held = state.stream(OPERATION, stream)?;
        let &MemoryCopy { dst, src, bytes, .. } = copy;
        for (side, what) in [(dst, "the destination"), (src, "the source")] {
            if let Location::Device { device, .. } = side {
                state.device(OPERATION, device)?;
                if stream.device() != device
                    && !matches!((dst, src), (Location::Device { .. }, Location::Device { .. }))
                {
                    return Err(wrong_device(OPERATION, stream, what, device));
                }
            }
        }
        // CUDA records a copy with the thread's context, and instantiates no graph of host copies of another device without one.
        let _current = if state.may_cross_mappings([(dst, bytes), (src, bytes)]) || state.may_capture() {
            Some(state.make_current(OPERATION, stream.device())?)
        } else {
            state.current_for(OPERATION, &held, stream.device())?
        };
        let calls = state.platform.calls();
        // SAFETY: The caller promises that both ranges are valid, and the stream is held.
        let code = unsafe {
            match (dst, src) {
                (Location::Host(_), Location::Host(_)) => {
                    return Err(Error::new(
                        ErrorKind::InvalidArgument,
                        OPERATION,
                        "source and destination are host memory, expected device memory on at least one side",
                    )
                    .with_hint("copy between host blocks with the CPU"));
                }
                _ if bytes == 0 => 0,
                (Location::Device { ptr, .. }, Location::Host(host)) => {
                    (calls.memcpy_htod_async)(ptr, host.as_ptr(), bytes, held.raw())
                }
                (Location::Host(host), Location::Device { ptr, .. }) => {
                    (calls.memcpy_dtoh_async)(host.as_ptr(), ptr, bytes, held.raw())
                }
                (Location::Device { device: to, ptr: dst }, Location::Device { device: from, ptr: src })
                    if to == from =>
                {
                    Self::same_device(OPERATION, stream, "the memory", to)?;
                    if dst < src.offset(bytes) && src < dst.offset(bytes) {
                        let message = format!("{bytes} bytes at {src} and at {dst} overlap, expected separate ranges");
                        return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message));
                    }
                    (calls.memcpy_dtod_async)(dst, src, bytes, held.raw())
                }
                (Location::Device { device: to, ptr: dst }, Location::Device { device: from, ptr: src }) => {
                    self.check_peers(OPERATION, (stream, &held), [from, to])?;
                    state.platform.memcpy_peer_async((to, dst), (from, src), bytes, held.raw())
                }
            }
        };
        state.check(OPERATION, code)
    }

    unsafe fn copy_2d(&self, copy: &MemoryCopy2d, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "copy_2d";
        let state = &*self.state;
        state.enter(OPERATION)?;
        let held = state.stream(OPERATION, stream)?;
        copy.shape.check(OPERATION)?;
        if !self.takes_rows_at_once(copy, stream.device()) {
            // SAFETY: As the caller promises, of whose rows each is one.
            return copy.in_rows(|row| unsafe { self.copy(row, stream) });
        }
        if let (Location::Device { device: to, ptr: dst }, Location::Device { device: from, ptr: src }) =
            (copy.dst, copy.src)
        {
            if to != from {
                self.check_peers(OPERATION, (stream, &held), [from, to])?;
            } else if copy.shape.overlaps(dst.get(), src.get()) {
                let message =
                    format!("rows at {src} and at {dst} overlap, expected separate rows: {}", copy.shape.described());
                return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message));
            }
        }
        let _current = state.make_current(OPERATION, stream.device())?;
        // SAFETY: The caller promises that all rows are valid, and the stream is held.
        let code = unsafe { state.platform.memcpy_2d_async(copy, held.raw()) };
        state.check(OPERATION, code)
    }

    unsafe fn fill(&self, fill: &MemoryFill, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "fill";
        let state = &*self.state;
        state.enter(OPERATION)?;
        let held = state.stream(OPERATION, stream)?;
        let &MemoryFill { device, dst, pattern, count, .. } = fill;
        state.device(OPERATION, device)?;
        Self::same_device(OPERATION, stream, "the destination", device)?;
        if count == 0 {
            return Ok(());
        }
        let size = pattern.bytes();
        if !dst.is_aligned_to(size) {
            let message = format!("the destination is {dst}, expected a multiple of the pattern's {size} bytes");
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message));
        }
        let _current = state.current_for(OPERATION, &held, device)?;
        let (calls, raw) = (state.platform.calls(), held.raw());
        // SAFETY: The caller promises that the range is valid, and the stream is held.
        let code = unsafe {
            match pattern {
                FillPattern::U8(value) => (calls.memset_d8_async)(dst, value, count, raw),
                FillPattern::U16(value) => (calls.memset_d16_async)(dst, value, count, raw),
                FillPattern::U32(value) => (calls.memset_d32_async)(dst, value, count, raw),
            }
        };
        state.check(OPERATION, code)
    }

    // ------------------------------------------------------------------ capture and replay

    fn begin_capture(&self, stream: StreamId, mode: CaptureMode) -> Result<()> {
        const OPERATION: &str = "begin_capture";
        let state = &*self.state;
        state.enter(OPERATION)?;
        let held = state.stream(OPERATION, stream)?;
        self.state.require(OPERATION, stream.device(), |can| can.capture, "capture")?;
        if held.is_default() {
            // The per-thread stream is a different stream in each thread, so its capture could not be counted.
            return Err(Error::new(ErrorKind::Capture, OPERATION, "a default stream cannot be captured")
                .with_hint("capture a stream that `create_stream` returned"));
        }
        if state.is_capturing(OPERATION, held.raw())? {
            return Err(Error::new(ErrorKind::Capture, OPERATION, "the stream already takes part in a capture")
                .with_hint("end that capture first"));
        }
        let begin = required(OPERATION, state.platform.calls().stream_begin_capture, "capture")?;
        let number = match mode {
            CaptureMode::Global => capture_mode::GLOBAL,
            CaptureMode::ThreadLocal => capture_mode::THREAD_LOCAL,
            CaptureMode::Relaxed => capture_mode::RELAXED,
            _ => return Err(Error::unknown(OPERATION, &mode)),
        };
        // Counted before it begins, so that no call of another thread meets an unknown capture.
        state.captures.began(stream.device());
        if mode == CaptureMode::Global {
            // Queries that did not see the capture are answered first.
            thread_records::wait_for_questions();
        }
        let pause = if state.events_follow() { state.pause(OPERATION, stream).map(Some) } else { Ok(None) };
        let outcome = pause.and_then(|pause| {
            // SAFETY: The stream is held.
            let began = state.check(OPERATION, unsafe { begin(held.raw(), number) });
            match pause {
                Some(pause) if began.is_ok() => state.open(pause),
                Some(pause) => state.resume(pause),
                None => {}
            }
            began
        });
        if outcome.is_err() {
            state.captures.ended(stream.device());
            return outcome;
        }
        held.set_capturing_thread(if mode == CaptureMode::Relaxed { 0 } else { state::this_thread() });
        if held.set_flag(CAPTURES, true) {
            // Foreign code has ended the previous capture, which was counted until now.
            state.captures.ended(stream.device());
        }
        outcome
    }

    unsafe fn end_capture(&self, stream: StreamId) -> Result<GraphId> {
        const OPERATION: &str = "end_capture";
        let state = &*self.state;
        state.enter(OPERATION)?;
        let held = state.stream(OPERATION, stream)?;
        self.state.require(OPERATION, stream.device(), |can| can.capture, "capture")?;
        let end = required(OPERATION, state.platform.calls().stream_end_capture, "capture")?;
        if held.is_default() || !state.is_capturing(OPERATION, held.raw())? {
            return Err(Error::new(ErrorKind::Capture, OPERATION, "the stream has no open capture")
                .with_hint("call `begin_capture` first"));
        }
        // The vendor would return an error and end the capture.
        if !held.can_end_here() {
            return Err(Error::new(
                ErrorKind::Capture,
                OPERATION,
                "the capture began on another thread and is still open",
            )
            .with_hint("end the capture on the thread that began it, or begin it in relaxed mode"));
        }
        let mut raw = RawGraph::NULL;
        // SAFETY: The stream is held, and the call writes one number, which outlives it.
        let code = unsafe { end(held.raw(), &mut raw) };
        let dead = state.has_died(code);
        let status = state.capture_status(OPERATION, held.raw()).unwrap_or(0);
        // Ending a capture on a stream that joined it does not end it.
        if (dead || status == capture_status::NONE) && held.set_flag(CAPTURES, false) {
            state.captures.ended(stream.device());
        }
        // The stream may be destroyed from here on.
        drop(held);
        if dead {
            state.replace_dead(OPERATION, stream)?;
        }
        if state.events_follow() {
            state.resume_ended(OPERATION);
        }
        state.check(OPERATION, code)?;
        state.made(OPERATION, raw)?;
        let family = state.graph_turns.found();
        state.graphs.insert(OPERATION, stream.device(), raw, with_number(family.0)).inspect_err(|_| {
            if let Some(destroy) = state.platform.calls().graph_destroy {
                // SAFETY: No other code knows the graph.
                unsafe { destroy(raw) };
            }
        })
    }

    fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        const OPERATION: &str = "is_capturing";
        let state = &*self.state;
        state.enter(OPERATION)?;
        let held = state.stream(OPERATION, stream)?;
        self.state.require(OPERATION, stream.device(), |can| can.capture, "capture")?;
        if stream.is_legacy_default() {
            return Ok(false);
        }
        let _current = state.current_for(OPERATION, &held, stream.device())?;
        state.is_capturing(OPERATION, held.raw())
    }

    fn instantiate_graph(&self, graph: GraphId) -> Result<GraphExecId> {
        const OPERATION: &str = "instantiate_graph";
        let state = &*self.state;
        state.enter(OPERATION)?;
        let recorded = state.graphs.hold(OPERATION, graph)?;
        let instantiate = required(OPERATION, state.platform.calls().graph_instantiate_with_flags, "capture")?;
        let _relaxed = state.relaxed();
        let _current = state.make_current(OPERATION, graph.device())?;
        let mut raw = RawGraphExec::NULL;
        let family = Family(recorded.number());
        let turn = state.graph_turns.wait_for(family);
        // SAFETY: The graph is held, no other call uses it, and the call writes one number, which outlives it.
        let code = unsafe { instantiate(&mut raw, recorded.raw(), 0) };
        drop(turn);
        state.check(OPERATION, code)?;
        state.made(OPERATION, raw)?;
        state.graph_execs.insert(OPERATION, graph.device(), raw, with_number(family.0)).inspect_err(|_| {
            if let Some(destroy) = state.platform.calls().graph_exec_destroy {
                let _turn = state.graph_turns.wait_for(family);
                // SAFETY: No other code knows the graph.
                unsafe { destroy(raw) };
            }
        })
    }

    unsafe fn launch_graph(&self, graph: GraphExecId, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "launch_graph";
        let state = &*self.state;
        state.enter(OPERATION)?;
        let executable = state.graph_execs.hold(OPERATION, graph)?;
        let held = state.stream(OPERATION, stream)?;
        Self::same_device(OPERATION, stream, "the graph", graph.device())?;
        state.refuse_in_capture(OPERATION, &held)?;
        let launch = required(OPERATION, state.platform.calls().graph_launch, "capture")?;
        let _current = state.current_for(OPERATION, &held, stream.device())?;
        // SAFETY: Both are held. The caller promises that the memory in the graph is valid.
        state.check(OPERATION, unsafe { launch(executable.raw(), held.raw()) })
    }

    fn destroy_graph(&self, graph: GraphId) -> Result<()> {
        const OPERATION: &str = "destroy_graph";
        let state = &*self.state;
        state.enter(OPERATION)?;
        state.graphs.remove(OPERATION, graph, 0, |removed| state.destroy_raw_graph(OPERATION, removed))
    }

    fn destroy_graph_exec(&self, graph: GraphExecId) -> Result<()> {
        const OPERATION: &str = "destroy_graph_exec";
        let state = &*self.state;
        state.enter(OPERATION)?;
        state.graph_execs.remove(OPERATION, graph, 0, |removed| state.destroy_raw_graph_exec(OPERATION, removed))
    }

    // ------------------------------------------------------------------ the other traits

    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        const OPERATION: &str = "create_blas_handle";
        let state = &self.state;
        state.enter(OPERATION)?;
        state.device(OPERATION, device)?;
        let _relaxed = state.relaxed();
        let _current = state.make_current(OPERATION, device)?;
        match options.kind {
            BlasKind::Blas => Ok(Box::new(DriverBlas::create(state, device)?)),
            BlasKind::Lt => {
                self.state.require(OPERATION, device, |can| can.lt_plans, "lt_plans")?;
                Ok(Box::new(LtBlas::create(state, device)?))
            }
            kind => Err(Error::unknown(OPERATION, &kind)),
        }
    }

    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        Arc::<DriverHost<P>>::clone(&self.host)
    }

    fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
        self.ipc.as_ref().map(|ipc| Arc::<DriverIpc<P>>::clone(ipc) as Arc<dyn IpcSharing>)
    }
}

impl<P: Platform> DriverBackend<P> {
    /// Prepares a copy between two devices, which runs on a stream of one of them.
    fn check_peers(
        &self,
        operation: &'static str,
        (stream, held): (StreamId, &HeldStream<'_>),
        [from, to]: [u32; 2],
    ) -> Result<()> {
        let state = &self.state;
        state.require(operation, from, |can| can.peer_copy, "peer_copy")?;
        if stream.device() != from {
            Self::same_device(operation, stream, "the destination", to)?;
        }
        // A peer copy loses a capture on both vendors.
        state.refuse_in_capture(operation, held)?;
        state.enable_peer(operation, from, to)?;
        state.enable_peer(operation, to, from)?;
        Ok(())
    }

    /// Returns whether one call of the vendor makes the copy on a stream of `device`. Other copies are made row by row: those that the
    /// contract refuses, and without [`rows_anywhere`](super::Quirks::rows_anywhere) those between devices and over several mappings.
    fn takes_rows_at_once(&self, copy: &MemoryCopy2d, device: u32) -> bool {
        let &MemoryCopy2d { dst, src, shape, .. } = copy;
        let is_here = |side| matches!(side, Location::Device { device: of, .. } if of == device);
        let is_host = |side| matches!(side, Location::Host(_));
        let rows_anywhere = self.state.platform.quirks().rows_anywhere;
        let is_one_device = |side| is_host(side) || is_here(side);
        let is_taken = |side| is_one_device(side) || rows_anywhere;
        let (Some(to_bytes), Some(from_bytes)) = (shape.dst_bytes(), shape.src_bytes()) else { return false };
        !shape.is_empty()
            && (is_here(dst) && is_taken(src) || is_taken(dst) && is_here(src))
            && shape.dst_pitch.max(shape.src_pitch) <= MAX_PITCH
            && (rows_anywhere && is_one_device(dst) && is_one_device(src)
                || !self.state.may_cross_mappings([(dst, to_bytes), (src, from_bytes)]))
    }

    fn allocate_in_order(&self, device: u32, stream: StreamId, bytes: usize) -> Result<DevicePtr> {
        const OPERATION: &str = "allocate";
        let state = &*self.state;
        self.state.require(OPERATION, device, |can| can.stream_ordered_memory, "stream_ordered_memory")?;
        let held = state.stream(OPERATION, stream)?;
        Self::same_device(OPERATION, stream, "the memory", device)?;
        check_size(OPERATION, bytes, state.device(OPERATION, device)?.info.memory_bytes)?;
        state.refuse_in_capture(OPERATION, &held)?;
        let allocate = required(OPERATION, state.platform.calls().mem_alloc_async, "stream_ordered_memory")?;
        let _relaxed = state.relaxed();
        let _current = state.make_current(OPERATION, device)?;
        state.pool(device);
        let mut address = DevicePtr::new(0);
        // SAFETY: The stream is held, and the call writes one number, which outlives it.
        let code = self.with_trimmed_pool(device, || unsafe { allocate(&mut address, bytes, held.raw()) });
        state.check(OPERATION, code)?;
        state.made(OPERATION, address)?;
        state.blocks.lock().insert(address, Block { device, bytes, kind: BlockKind::StreamOrdered });
        Ok(address)
    }
}

/// Refuses sizes that need no vendor call.
fn check_size(operation: &'static str, bytes: usize, most: u64) -> Result<()> {
    if bytes == 0 {
        return Err(Error::new(ErrorKind::InvalidArgument, operation, "0 bytes were requested, expected at least 1"));
    }
    if bytes as u64 > most {
        let message = format!("{bytes} bytes were requested, expected at most the device's {most}");
        return Err(Error::new(ErrorKind::OutOfMemory, operation, message).with_hint("request fewer bytes"));
    }
    Ok(())
}
