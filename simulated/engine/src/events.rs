//! Events by their raw handles.

use std::collections::BTreeMap;
use std::sync::Arc;

use highwater_hal::{Backend, Completion, EventHandle, EventId, EventOptions};
use parking_lot::{Mutex, RwLock};

use crate::capture_state::{CAPTURES, Capture};
use crate::code::{Answer, Code};
use crate::current::with_context;
use crate::handles::new_handles;
use crate::process::{Simulation, simulation};
use crate::variants::{Vendor, vendor};

/// Flags of `cuEventCreate`.
pub mod flags {
    /// `CU_EVENT_BLOCKING_SYNC`; a wait here always sleeps.
    pub const BLOCKING_SYNC: u32 = 1;
    /// `CU_EVENT_DISABLE_TIMING`.
    pub const DISABLE_TIMING: u32 = 2;
    /// `CU_EVENT_INTERPROCESS`.
    pub const INTERPROCESS: u32 = 4;
    /// Flags of `hipEventCreateWithFlags` that set how far a record makes writes visible.
    pub const HIP_RELEASES: u32 = 0x2000_0000 | 0x4000_0000 | 0x8000_0000;
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) id: EventId,
    pub(crate) device: u32,
    pub(crate) flags: u32,
    /// True if it was opened by a handle of another process.
    pub(crate) is_import: bool,
    /// The capture in which it was recorded last.
    captured: Mutex<Option<Arc<Capture>>>,
    /// The exported handle, whose descriptor importers open in this process.
    pub(crate) exported: Mutex<Option<EventHandle>>,
}

/// Every live event.
static EVENTS: RwLock<BTreeMap<u64, Arc<Event>>> = RwLock::new(BTreeMap::new());

impl Simulation {
    /// Returns the event of a raw handle.
    ///
    /// # Errors
    /// 400 for an unknown event, the code of a lost context.
    pub(crate) fn event(&self, raw: u64) -> Answer<Arc<Event>> {
        let event = EVENTS.read().get(&raw).cloned().ok_or(Code::INVALID_HANDLE)?;
        self.check_context(event.device)?;
        Ok(event)
    }

    pub(crate) fn insert_event(&self, id: EventId, device: u32, flags: u32, is_import: bool) -> u64 {
        let raw = new_handles(1);
        let (captured, exported) = (Mutex::new(None), Mutex::new(None));
        let event = Arc::new(Event { id, device, flags, is_import, captured, exported });
        EVENTS.write().insert(raw, event);
        raw
    }

    /// Destroys the events of a context that ends.
    pub(crate) fn end_events(&self, device: u32) {
        let ended: Vec<_> = EVENTS.write().extract_if(.., |_, event| event.device == device).collect();
        for (_, event) in ended {
            // The mock's table holds it as long as this table does.
            let _ = self.gpu.destroy_event(event.id);
        }
    }

    /// Checks a query of an event or a wait of the host for it.
    fn check_askable(&self, event: &Event) -> Answer<()> {
        if let Some(capture) = &*event.captured.lock() {
            if capture.is_ended() {
                return Err(Code::INVALID_VALUE);
            }
            self.lose_capture(capture);
            return Err(Code::CAPTURED_EVENT);
        }
        self.check_unsafe_call()
    }
}

/// `cuEventCreate`.
///
/// # Errors
/// 1 for unknown flags and for an interprocess event with timing, 201 without a context.
pub fn create(wanted: u32) -> Answer<u64> {
    let (simulation, device) = with_context()?;
    let known = flags::BLOCKING_SYNC | flags::DISABLE_TIMING | flags::INTERPROCESS;
    let releases = if vendor() == Vendor::Hip { wanted & flags::HIP_RELEASES } else { 0 };
    // HIP: at most one kind of release.
    if wanted & !(known | releases) != 0 || releases.count_ones() > 1 {
        return Err(Code::INVALID_VALUE);
    }
    let mut options = EventOptions::new();
    if wanted & flags::DISABLE_TIMING == 0 {
        options = options.with_timing();
    }
    if wanted & flags::INTERPROCESS != 0 {
        if options.timing {
            return Err(Code::INVALID_VALUE);
        }
        options = options.with_interprocess();
    }
    let id = simulation.gpu.create_event(device, &options).map_err(|error| simulation.code_of(error))?;
    Ok(simulation.insert_event(id, device, wanted, false))
}

/// `cuEventDestroy_v2`. Queued waits continue.
///
/// # Errors
/// 400 for an unknown event, the code of a lost context.
pub fn destroy(raw: u64) -> Answer<()> {
    let simulation = simulation()?;
    let mut events = EVENTS.write();
    simulation.check_context(events.get(&raw).ok_or(Code::INVALID_HANDLE)?.device)?;
    let event = events.remove(&raw).ok_or(Code::INVALID_HANDLE)?;
    drop(events);
    simulation.gpu.destroy_event(event.id).map_err(|error| simulation.code_of(error))
}

/// `cuEventRecord`.
///
/// # Errors
/// 400 if the event belongs to another device than the stream, 900 for an interprocess event in a capture, 901 in an
/// invalidated capture.
pub fn record(raw: u64, raw_stream: u64) -> Answer<()> {
    let simulation = simulation()?;
    let event = simulation.event(raw)?;
    let stream = simulation.stream(raw_stream)?;
    if event.device != stream.device {
        return Err(Code::INVALID_HANDLE);
    }
    simulation.before_enqueue(&stream)?;
    let capture = CAPTURES.of(stream.id);
    // Locked before the record, so that no thread mistakes a captured record for an ordinary one.
    let mut captured = event.captured.lock();
    simulation.gpu.record_event(event.id, stream.id).map_err(|error| simulation.code_of(error))?;
    *captured = capture;
    Ok(())
}

/// `cuEventQuery`.
///
/// # Errors
/// 600 until the event is reached. If it was last recorded in a capture, 907 until the end of the capture, which is
/// invalidated, and 1 after that. 900 as [`Simulation::check_unsafe_call`].
pub fn query(raw: u64) -> Answer<()> {
    let simulation = simulation()?;
    let event = simulation.event(raw)?;
    simulation.check_askable(&event)?;
    match simulation.gpu.query_event(event.id).map_err(|error| simulation.code_of(error))? {
        Completion::Complete => Ok(()),
        _ => Err(Code::NOT_READY),
    }
}

/// `cuEventSynchronize`.
///
/// # Errors
/// As [`query`], except 600.
pub fn synchronize(raw: u64) -> Answer<()> {
    let simulation = simulation()?;
    let event = simulation.event(raw)?;
    simulation.check_askable(&event)?;
    simulation.gpu.synchronize_event(event.id).map_err(|error| simulation.code_of(error))
}

/// `cuEventElapsedTime`, in milliseconds.
///
/// # Errors
/// 400 for events without timing, of two devices, or never recorded; 600 if one is not reached; 907 if one was last recorded in
/// a capture.
pub fn elapsed(raw_start: u64, raw_end: u64) -> Answer<f32> {
    let simulation = simulation()?;
    let (start, end) = (simulation.event(raw_start)?, simulation.event(raw_end)?);
    for event in [&start, &end] {
        if event.flags & flags::DISABLE_TIMING != 0 || event.device != start.device {
            return Err(Code::INVALID_HANDLE);
        }
    }
    for event in [&start, &end] {
        if event.captured.lock().is_some() {
            return Err(Code::CAPTURED_EVENT);
        }
    }
    let elapsed = simulation.gpu.event_elapsed_ns(start.id, end.id).map_err(|error| match error.kind() {
        highwater_hal::ErrorKind::InvalidArgument => Code::INVALID_HANDLE,
        highwater_hal::ErrorKind::InvalidState => {
            // An event that was never recorded takes precedence over one that is not complete.
            let never = |id| {
                let alone = simulation.gpu.event_elapsed_ns(id, id);
                alone.is_err_and(|error| error.kind() == highwater_hal::ErrorKind::InvalidArgument)
            };
            if never(start.id) || never(end.id) { Code::INVALID_HANDLE } else { Code::NOT_READY }
        }
        _ => simulation.code_of(error),
    })?;
    if elapsed > 0 {
        return Ok(elapsed as f32 / 1e6);
    }
    // For two points in reverse order, the mock returns zero and the vendor a negative time.
    let back = simulation.gpu.event_elapsed_ns(end.id, start.id).map_err(|error| simulation.code_of(error))?;
    Ok(-(back as f32) / 1e6)
}

/// `cuStreamWaitEvent`.
///
/// # Errors
/// 1 for unknown flags; 905 if a stream in a capture would wait for a record outside of it; 902 for a record of another
/// capture; 906 if the legacy default stream would join; 901 in an invalidated capture. Each of these invalidates the captures.
pub fn stream_wait(raw_stream: u64, raw: u64, wait_flags: u32) -> Answer<()> {
    let simulation = simulation()?;
    let event = simulation.event(raw)?;
    let stream = simulation.stream(raw_stream)?;
    if wait_flags != 0 {
        // 1 is a wait for an event outside of the capture, which the mock cannot record.
        return Err(if wait_flags == 1 { Code::NOT_SUPPORTED } else { Code::INVALID_VALUE });
    }
    let recorded_in = event.captured.lock().clone();
    let part = CAPTURES.of(stream.id);
    if part.as_ref().is_some_and(|part| part.is_lost()) {
        return Err(Code::STREAM_CAPTURE_INVALIDATED);
    }
    let wait = || simulation.gpu.stream_wait_event(stream.id, event.id).map_err(|error| simulation.code_of(error));
    match (recorded_in, part) {
        (None, None) => {
            simulation.before_enqueue(&stream)?;
            wait()
        }
        (None, Some(part)) => {
            // A wait for an event that was never recorded does nothing.
            wait().inspect_err(|_| simulation.lose_capture(&part)).map_err(|code| match code {
                Code::STREAM_CAPTURE_UNSUPPORTED => Code::STREAM_CAPTURE_ISOLATION,
                code => code,
            })
        }
        (Some(capture), _) if capture.is_ended() => Err(Code::CAPTURED_EVENT),
        (Some(capture), _) if capture.is_lost() => Err(Code::STREAM_CAPTURE_INVALIDATED),
        (Some(capture), Some(part)) if Arc::ptr_eq(&capture, &part) => wait(),
        (Some(capture), Some(part)) => {
            simulation.lose_capture(&capture);
            simulation.lose_capture(&part);
            Err(Code::STREAM_CAPTURE_MERGE)
        }
        (Some(capture), None) if stream.is_legacy() => {
            simulation.lose_capture(&capture);
            Err(Code::STREAM_CAPTURE_IMPLICIT)
        }
        (Some(capture), None) => {
            wait()?;
            CAPTURES.join(stream, capture);
            Ok(())
        }
    }
}
